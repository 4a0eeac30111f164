"""Two ranks of torch.distributed or $ESPER_RANKS, a GPU each: training that sleeps, tensor
parallelism with registered memory, symmetric memory, communication streams, and a rank that dies.
And NCCL within one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from scenario import NATIVE, OURS, ranks, run_program

pytestmark = pytest.mark.two_gpus(may_share=True)
HOOK = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}


def test_fsdp2_that_sleeps_has_the_same_losses() -> None:
    for found in ranks("fsdp2_sleeps", OURS):
        assert len(set(found["plain"])) > 5
        assert found["sleeping"] == found["plain"]
        assert found["stays"] == []
        assert min(found["given_back"]) > 0


@pytest.fixture(scope="module")
def native_losses() -> list[str]:
    first, *others = ranks("tensor_parallel", NATIVE, "plain")
    assert all(one["losses"] == first["losses"] for one in others)
    assert len(set(first["losses"])) > 5
    losses: list[str] = first["losses"]
    return losses


@pytest.mark.parametrize("how", ["plain", "registered", "pool"])
def test_tensor_parallel_training_gives_natives_losses(how: str, native_losses: list[str]) -> None:
    for found in ranks("tensor_parallel", OURS, how, **(HOOK if how == "registered" else {})):
        assert found["losses"] == native_losses
        # NCCL hears of whole segments only.
        assert (False in found["expandable"]) == (how != "plain")


@pytest.mark.two_gpus
def test_sums_of_symmetric_memory_are_right() -> None:
    for found in ranks("symmetric_memory", OURS):
        assert found["wrong"] == 0
        assert not found["multicast"]
        assert found["slept"] > 0


def test_collectives_in_a_graph_are_right_after_sleep() -> None:
    """Without NCCL's own registration of what a graph uses, which names pages to the peer."""
    for found in ranks("captured_collective_sleeps", OURS, NCCL_GRAPH_REGISTER="0"):
        assert found["wrong"] == 0
        assert found["given_back"] > 0


@pytest.mark.parametrize("memory", ["short", "plenty"])
@pytest.mark.parametrize("how", ["record_use", "record_stream", "automatic"])
def test_a_collective_writes_what_was_allocated_after_its_stream_waited(
    how: str, memory: str
) -> None:
    env = {"ESPER_ALLOC_USES": "automatic"} if how == "automatic" else {}
    mark = "nothing" if how == "automatic" else how
    for found in ranks("wait_then_allocate", OURS, mark, memory, **env):
        assert found["wrong"] == 0
        if memory == "short":
            assert found["waited"] == found["tries"]


def test_without_protection_it_writes_what_is_still_read() -> None:
    for found in ranks(
        "wait_then_allocate", OURS, "nothing", "plenty", ESPER_ALLOC_SEGMENTS="classic"
    ):
        assert found["wrong"] > 0


@pytest.mark.two_gpus
def test_a_product_that_spins_until_its_input_is_copied_is_right() -> None:
    found = ranks("fused_all_gather_matmul", OURS)
    if not all(one["supported"] for one in found):
        pytest.skip(found[0]["said"])
    for one in found:
        assert one["turns"] >= 10
        assert one["wrong"] == 0
        # Each of its few streams is waited for in vain once in 40 seconds at most.
        assert one["held_back_in_vain"] <= 4, one


@pytest.mark.two_gpus
def test_one_process_with_two_gpus_gives_natives_losses() -> None:
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
    native, ours = (run_program("data_parallel", one, env=env) for one in (NATIVE, OURS))
    assert len(set(native["losses"])) > 5
    assert ours == native
    assert native["wrong"] == 0


@pytest.mark.parametrize("how", ["watchdog", "blocking"])
def test_a_rank_that_dies_leaves_no_other_end_than_natives(how: str) -> None:
    env = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    if how == "blocking":
        env["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(ranks, "killed", allocator, how, **env) for allocator in (NATIVE, OURS)]
        native, ours = (one.result() for one in both)
    assert ours == native
    assert native[1] == {"end": "-9"}
    assert native[0] != {"said": "done", "end": "0"}
