#include "core/base/config.h"

#include "world.h"

static esper_config given;
static config_t with(void)
{
  world w;
  sim_options options = {0};
  world_begin_with(&w, &options, &given);
  config_t config = *config_of(w.core);
  world_end(&w);
  return config;
}

/* As in torch: roundup_power2_divisions of 4 makes 1200 MiB 1280 MiB. */
TEST(powers_of_two_can_be_divided)
{
  given = (esper_config){0};
  for (int i = 0; i < ESPER_ROUNDUP_STEPS; i++)
    given.roundup_power2_divisions[i] = 4;
  config_t c = with();
  CHECK_EQ(config_round(&c, 1200 * MIB), 1280 * MIB);
  CHECK_EQ(config_round(&c, 1280 * MIB), 1280 * MIB);
  CHECK_EQ(config_round(&c, 1281 * MIB), 1536 * MIB);
  CHECK_EQ(config_round(&c, 700), 1024);  /* too small to divide */
  given.roundup_power2_divisions[10] = 1; /* [1 GiB, 2 GiB): not */
  c = with();
  CHECK_EQ(config_round(&c, 1200 * MIB + 1), 1200 * MIB + 512);
  CHECK_EQ(config_round(&c, 600 * MIB), 640 * MIB);
  for (int i = 0; i < ESPER_ROUNDUP_STEPS; i++) /* nothing is so large */
    given.roundup_power2_divisions[i] = (size_t)1 << 55;
  c = with();
  CHECK_EQ(config_round(&c, 600 * MIB + 1), 600 * MIB + 512);
}

TEST(segments_are_as_large_as_natives)
{
  given = (esper_config){0};
  config_t c = with();
  CHECK_EQ(config_segment_size(&c, 512), 2 * MIB);
  CHECK_EQ(config_segment_size(&c, MIB), 2 * MIB);
  CHECK_EQ(config_segment_size(&c, MIB + 512), 20 * MIB);
  CHECK_EQ(config_segment_size(&c, 10 * MIB - 512), 20 * MIB);
  CHECK_EQ(config_segment_size(&c, 10 * MIB), 10 * MIB);
  CHECK_EQ(config_segment_size(&c, 11 * MIB), 12 * MIB);
  CHECK(!config_is_large(MIB));
  CHECK(config_is_large(MIB + 512));
}

TEST(small_rests_stay_in_a_large_block)
{
  given = (esper_config){0};
  config_t c = with();
  CHECK(config_splits(&c, 1024, 512, false));
  CHECK(!config_splits(&c, 512, 512, false));
  CHECK(!config_splits(&c, 2 * MIB + 256 * KIB, 2 * MIB, true));
  CHECK(config_splits(&c, 2 * MIB + 256 * KIB + 512, 2 * MIB, true));
}

TEST(oversize_blocks_are_neither_split_nor_wasted)
{
  given = (esper_config){.max_split_size = 32 * MIB};
  config_t c = with();
  CHECK(config_is_oversize(&c, 32 * MIB));
  CHECK(!config_is_oversize(&c, 31 * MIB));
  CHECK(!config_fits(&c, 64 * MIB, 2 * MIB)); /* not for a small request */
  CHECK(config_fits(&c, 31 * MIB, 2 * MIB));
  CHECK(config_fits(&c, 64 * MIB, 50 * MIB));  /* wastes 14 MiB: fine */
  CHECK(!config_fits(&c, 64 * MIB, 44 * MIB)); /* 20 MiB: not */
  CHECK(!config_splits(&c, 64 * MIB, 40 * MIB, true));
}

TEST(a_bad_configuration_is_refused_and_nothing_changes)
{
  world w;
  world_begin(&w);
  esper_config now, bad = {.segments = (esper_segments)7};
  CHECK_REFUSED(esper_configure(w.core, &bad), ESPER_INVALID, "segments");
  bad = (esper_config){.roundup_power2_divisions = {3}};
  CHECK_REFUSED(esper_configure(w.core, &bad), ESPER_INVALID, "powers of two");
  CHECK_STATUS(esper_configure(w.core, &(esper_config){.large_segment_size = SIZE_MAX}),
               ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "large_segment_size"));
  CHECK_STATUS(esper_configure(w.core, &(esper_config){.rejection_share = 1.5}), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "rejection_share is 1.5"));
  esper_core *none;
  CHECK_STATUS(esper_core_create(sim_driver(w.s), &bad, &none), ESPER_INVALID);
  CHECK(!none);
  esper_get_config(w.core, &now);
  CHECK_EQ(now.segments, ESPER_SEGMENTS_AUTO);
  CHECK_EQ(now.allowance, ESPER_ALLOWANCE_OFF);
  CHECK_EQ(now.roundup_power2_divisions[0], 0);
  world_end(&w);
}
