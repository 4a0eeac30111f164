/* core_assert.h: asserts. For mistakes of the core; a caller's mistake gets ESPER_INVALID. */
#ifndef ESPER_CORE_ASSERT_H
#define ESPER_CORE_ASSERT_H

void core_assert_failed(const char *what, const char *file, int line);
#ifdef NDEBUG
#define core_assert(x) ((void)sizeof(x))
#else
#define core_assert(x) ((x) ? (void)0 : core_assert_failed(#x, __FILE__, __LINE__))
#endif

#endif
