"""The package without a GPU: what it loads, what it refuses, the swap."""

import ctypes
import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import esper_alloc
from esper_alloc.installation import pytorch
from esper_alloc.installation.pytorch import OtherTorchError, UnavailableError, check_torch
from esper_alloc.torch_allocator import choices, enabling

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))
import helper

pytestmark = pytest.mark.usefixtures("driver")

#: Makes `import torch` fail as it does where there is none.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"

#: At hand in each process.
REFUSAL = """
def refusal(kind, call):
    "What the call's error says, which is of that kind."
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("no error")
"""


def environment(env: dict[str, str]) -> dict[str, str]:
    """Where this test found the package is where a process finds it."""
    clean = {k: v for k, v in os.environ.items() if k != "ESPER_ALLOC"}
    root = str(Path(esper_alloc.__file__).parents[1])
    clean["PYTHONPATH"] = os.pathsep.join([root, clean.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**clean, **env}


def together(source: str) -> str:
    """Code that prints its warnings and errors where it prints all else."""
    return "import os; os.dup2(1, 2)\n" + REFUSAL + textwrap.dedent(source)


def run(source: str, **env: str) -> str:
    """Runs source in a fresh process; what it printed, warnings included."""
    command = [sys.executable, "-c", together(source)]
    how = {"capture_output": True, "text": True, "timeout": 1200}
    return helper.printed_by(lambda: subprocess.run(command, env=environment(env), **how))


def run_beside_torch(source: str, **env: str) -> str:
    """The same in a process that has imported torch and the package, which is quicker. The
    variables may be those of CUDA and of the package, but for ESPER_ALLOC."""
    return helper.printed_by(lambda: helper.in_nursery(together(source), environment(env)))


def works(call: Callable[[], object]) -> bool:
    try:
        call()
    except UnavailableError:
        return False
    return True


needs_shim = pytest.mark.skipif(
    not works(esper_alloc.allocator), reason="the PyTorch part is not built for this torch"
)
needs_core = pytest.mark.skipif(not works(esper_alloc.library_path), reason="the core is not built")


def has_cuda_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.version.cuda is not None


needs_cuda_torch = pytest.mark.skipif(not has_cuda_torch(), reason="no torch with CUDA")


# Importing


@pytest.mark.parametrize("variable", [{}, {"ESPER_ALLOC": "0"}, {"ESPER_ALLOC": ""}], ids=str)
def test_import_loads_neither_torch_nor_compiled_modules(variable):
    code = """
        import sys
        import esper_alloc
        assert "torch" not in sys.modules
        assert not [n for n in sys.modules if n.startswith("esper_alloc._")]
        assert not esper_alloc.is_enabled()
        assert "torch" not in sys.modules
        """
    run(code, **variable)


def test_without_torch_every_name_is_there_and_calls_say_what_to_install():
    run(
        WITHOUT_TORCH
        + textwrap.dedent("""
        import esper_alloc
        without = []
        for name in esper_alloc.__all__:
            try:
                getattr(esper_alloc, name)
            except esper_alloc.UnavailableError as error:
                assert "needs PyTorch" in str(error)
                without.append(name)
        # These are modules of PyTorch; all else can be asked for.
        assert without == ["RewardNormalizer", "RunningMeanStd", "ValueNormalizer"], without
        assert set(esper_alloc.__all__) <= set(dir(esper_alloc))
        esper_alloc.record_use([None, 3, "text"])
        with esper_alloc.using({"x": None}):
            pass
        arguments = dict(batch_size_per_env=1, n_envs=1, env_devices=["cpu"], seed=1)
        for call in (
            esper_alloc.enable, esper_alloc.allocator, esper_alloc.pluggable_allocator,
            lambda: esper_alloc.GatherBatchIterator([], [], **arguments),
            lambda: esper_alloc.SharedGPUGatherBatchIterator(shuffle=True, **arguments),
            esper_alloc.ImageTransform,
        ):
            said = refusal(esper_alloc.UnavailableError, call)
            assert "needs PyTorch" in said and "pip install" in said, said
        """)
    )


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'alocator'"):
        esper_alloc.alocator  # noqa: B018


def test_no_module_hides_a_public_function():
    names = {one.name for one in pkgutil.iter_modules(esper_alloc.__path__)}
    assert names and not names & set(esper_alloc.__all__)


# Refusals


def torch_like(version: str, *, cuda: str | None = "13.0", hip: str | None = None):
    return types.SimpleNamespace(
        __version__=version, version=types.SimpleNamespace(cuda=cuda, hip=hip)
    )


@pytest.fixture
def built_for(monkeypatch):
    def set_build(*torches: str) -> None:
        build = types.ModuleType("esper_alloc._build")
        build.BUILT_FOR = dict.fromkeys(torches, "13.0")
        monkeypatch.setitem(sys.modules, "esper_alloc._build", build)

    return set_build


@pytest.mark.parametrize(
    ("torch", "built", "told"),
    [
        (torch_like("2.11.0+rocm6.4", cuda=None, hip="6.4"), ["2.11"], "not support ROCm"),
        (torch_like("2.11.0+cpu", cuda=None), ["2.11"], "built without CUDA"),
        (torch_like("2.11.0+cu130"), [], "installed without its PyTorch part"),
        (torch_like("2.12.1+cu130"), ["2.11"], "built for torch 2.11, and this is torch 2.12.1"),
        (torch_like("2.2.0a0+git1"), ["2.11", "2.12"], "needs torch 2.11 or newer, and this is "
         "torch 2.2.0a0+git1: install a newer torch"),
        (torch_like("2.11.0+cu126", cuda="12.6"), ["2.11"], "has CUDA 12.6"),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence_with_a_remedy(built_for, torch, built, told):
    built_for(*built)
    with pytest.raises(UnavailableError) as refused:
        check_torch(torch)
    text = str(refused.value)
    # What function pointers can serve is told apart.
    assert isinstance(refused.value, OtherTorchError) == ("pluggable_allocator" in text)
    assert told in text
    assert torch.__version__ in text
    assert "\n" not in text
    if "ROCm" not in text:
        assert "pip install --no-build-isolation" in text


@pytest.mark.parametrize(
    "left_out, said",
    [(["_build.py"], "where nothing was built"), ([], "which was built for another Python than")],
)
def test_a_source_folder_that_was_not_built_for_this_python_says_so(tmp_path, left_out, said):
    pytest.importorskip("torch")
    shutil.copytree(
        Path(esper_alloc.__file__).parent,
        tmp_path / "esper_alloc",
        ignore=shutil.ignore_patterns("*.so", "__pycache__", *left_out),
    )
    (tmp_path / "setup.py").touch()
    printed = run(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import esper_alloc
        import torch
        torch.version.cuda = torch.version.cuda or "13.0"
        for call in (lambda: esper_alloc.enable(), lambda: esper_alloc.memory_stats()):
            print(refusal(esper_alloc.UnavailableError, call))
        """)
    for line in printed.splitlines()[-2:]:
        assert str(tmp_path) in line and said in line and "`cd` elsewhere" in line, printed


@pytest.mark.parametrize("torch", [torch_like("2.11.0+cu130"), torch_like("2.11.3", cuda="13.2")])
def test_the_same_minor_is_accepted(built_for, torch):
    built_for("2.11", "2.12")
    check_torch(torch)


# What a wheel has for each torch


@pytest.mark.parametrize("first", ["2.11", "2.12"])
def test_the_part_for_this_torch_is_chosen(first, tmp_path, monkeypatch):
    for version in ("2.11", "2.12"):
        folder = tmp_path / f"torch_{version.replace('.', '_')}"
        folder.mkdir()
        (folder / "_part.py").write_text(f"BUILT_FOR = {version!r}\n")
    monkeypatch.setattr(pytorch, "_PACKAGE", tmp_path)
    monkeypatch.setattr(esper_alloc, "__path__", [*esper_alloc.__path__])
    monkeypatch.delitem(sys.modules, "esper_alloc._part", raising=False)
    with pytest.raises(ImportError):
        pytorch.import_part("_part", "2.1.1")
    part = pytorch.import_part("_part", f"{first}.3+cu130")
    monkeypatch.setitem(sys.modules, "esper_alloc._part", part)  # gone after the test
    assert first == part.BUILT_FOR
    assert pytorch.import_part("_part", f"{first}.3+cu130") is part
    assert len([entry for entry in esper_alloc.__path__ if "torch_2" in entry]) == 1


OTHER_TORCH = """
import sys, types
import torch
build = types.ModuleType("esper_alloc._build")
build.BUILT_FOR, build.HAS_KERNELS, build.WHAT_IS_MISSING = {"1.0": "13.0"}, False, []
sys.modules["esper_alloc._build"] = build
"""


@needs_core
@needs_cuda_torch
@pytest.mark.parametrize("variable", ["", "1"])
def test_another_torch_is_served_through_function_pointers_and_a_sentence_says_so(variable):
    program = """
import esper_alloc
esper_alloc.enable()
esper_alloc.enable(uses="marked")
assert torch.cuda.get_allocator_backend() == "pluggable"
assert esper_alloc.is_enabled()
esper_alloc.record_use(torch.ones(3))
said = refusal(esper_alloc.UnavailableError, lambda: esper_alloc.enable(uses="automatic"))
assert "was built for torch 1.0" in said, said
"""
    printed = (run if variable else run_beside_torch)(OTHER_TORCH + program, ESPER_ALLOC=variable)
    (said,) = [line for line in printed.splitlines() if "Warning" in line]
    assert "RuntimeWarning: esper_alloc was built for torch 1.0, and this is torch 2." in said, said
    assert said.endswith("without statistics, snapshots and automatic uses."), said


@needs_core
@needs_cuda_torch
@pytest.mark.parametrize(
    "uses, conf, words",
    [
        ("automatic", "", "was built for torch 1.0"),
        ("marked", "backend:cudaMallocAsync", "remove backend:cudaMallocAsync"),
    ],
)
def test_what_function_pointers_cannot_serve_is_refused_and_nothing_changes(uses, conf, words):
    program = """
import esper_alloc
before = torch.cuda.get_allocator_backend()
print(refusal(esper_alloc.UnavailableError, lambda: esper_alloc.enable(uses=USES)))
assert torch.cuda.get_allocator_backend() == before and not esper_alloc.is_enabled()
assert "ESPER_ALLOC_USES" not in __import__("os").environ
"""
    program = program.replace("USES)", f"{uses!r})")
    if conf:
        printed = run(OTHER_TORCH + program, PYTORCH_CUDA_ALLOC_CONF=conf)
    else:
        printed = run_beside_torch(OTHER_TORCH + program)
    assert words in printed and "Warning" not in printed


# ESPER_ALLOC


@needs_shim
def test_the_switch_turns_enable_off():
    """Whatever the environment says otherwise; marks and helpers work as without the allocator."""
    printed = run(
        """
        import os, sys, esper_alloc
        before = dict(os.environ)
        esper_alloc.enable(segments="classic", uses="automatic", allowance=0, required=True)
        assert "torch" not in sys.modules and os.environ == before
        import torch
        assert not esper_alloc.is_enabled()
        assert torch.cuda.get_allocator_backend() == "native"
        assert set(esper_alloc.memory_stats().values()) == {0}
        assert esper_alloc.tag_stats() == {}
        x = torch.ones(3)
        esper_alloc.record_use([x])
        with esper_alloc.tag("weights"), esper_alloc.asleep("weights") as asleep:
            assert asleep == (0, 0, ())
        assert esper_alloc.wake() == 0 and esper_alloc.trim_sleep() is None
        for wrong in ({"uses": "x"}, {"segments": 3}, {"allowance": "y"}):
            try:
                esper_alloc.enable(**wrong)
            except ValueError:
                continue
            raise AssertionError(wrong)
        said = refusal(RuntimeError, lambda: esper_alloc.audit(fence=True).__enter__())
        assert said.endswith("memory only, and ESPER_ALLOC=0 turns it off."), said
        print(esper_alloc.report(), end="")
        """,
        ESPER_ALLOC="0",
        ESPER_ALLOC_USES="nonsense",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    assert printed == "esper_alloc is off: ESPER_ALLOC=0 turns it off\n"


@needs_shim
def test_a_sleep_that_is_switched_off_says_what_stays(monkeypatch):
    import torch

    monkeypatch.setenv("ESPER_ALLOC", "0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 + device)
    (stay,) = esper_alloc.sleep("weights").stays
    assert stay == (201, "esper_alloc is off: ESPER_ALLOC=0 turns it off")
    for wrong in ({"tags": 3}, {"device": 1.5}, {"process_groups": 5}, {"process_groups": [5]}):
        with pytest.raises(TypeError):
            esper_alloc.sleep(**wrong)
        with pytest.raises(TypeError):
            esper_alloc.wake(**wrong)


NO_CUDA = [
    ("torch.version.cuda = None", {}, "torch 2.", "was built without CUDA"),
    ("", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES hides every GPU", ""),
    ("", {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES hides every GPU", ""),
    ("", {"ESPER_ALLOC_LIBCUDA": "nowhere.so"}, "there is no CUDA driver (nowhere.so)", ""),
]


@needs_shim
@pytest.mark.parametrize(("change", "env", "begin", "end"), NO_CUDA)
def test_without_cuda_enable_warns_once_and_does_nothing(change, env, begin, end):
    printed = run_beside_torch(
        f"""
        import os, torch
        {change}
        import esper_alloc
        before = dict(os.environ)
        esper_alloc.enable(segments="classic")
        esper_alloc.enable(uses="automatic")
        assert os.environ == before and not esper_alloc.is_enabled()
        assert torch.cuda.get_allocator_backend() == "native"
        assert not torch.cuda.is_initialized()
        esper_alloc.record_use(torch.ones(3))
        assert esper_alloc.sleep() == (0, 0, ()) and esper_alloc.wake() == 0
        print(esper_alloc.report(), end="")
        print(refusal(esper_alloc.UnavailableError, lambda: esper_alloc.enable(required=True)))
        os.environ["ESPER_ALLOC_SEGMENTS"] = "bogus"
        assert "ESPER_ALLOC_SEGMENTS=bogus is not" in refusal(ValueError, esper_alloc.enable)
        """,
        **env,
    )
    warned, *said = printed.splitlines()
    assert "RuntimeWarning: esper_alloc does nothing here: " in warned and len(said) == 2, printed
    for line in (warned, *said):
        assert begin in line and end in line
    assert said[0].startswith("esper_alloc is off: ")


@pytest.mark.parametrize("error", [pytorch.NoCudaError("a", "b"), OtherTorchError("differs")])
def test_errors_survive_a_way_between_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


@needs_shim
def test_without_cuda_the_variable_warns_as_enable_does():
    printed = run("import esper_alloc", ESPER_ALLOC="1", CUDA_VISIBLE_DEVICES="")
    assert printed.count("esper_alloc does nothing here: CUDA_VISIBLE_DEVICES hides") == 1


@needs_core
@needs_cuda_torch
def test_another_allocator_is_named_before_anything_is_tried():
    """Found where its module keeps it, as RMM does."""
    printed = run_beside_torch("""
        import sys, types, torch, esper_alloc
        from torch.cuda.memory import CUDAPluggableAllocator
        library = esper_alloc.library_path()
        theirs = CUDAPluggableAllocator(library, "esper_alloc_malloc", "esper_alloc_free")
        torch.cuda.memory.change_current_allocator(theirs)
        def refused():
            print(refusal(esper_alloc.UnavailableError, esper_alloc.enable))
            assert torch.cuda.get_allocator_backend() == "pluggable"
            assert not esper_alloc.is_enabled() and "esper_alloc._torch" not in sys.modules
        kept = [theirs]
        del theirs
        refused()
        sys.modules["rmm.allocators.torch"] = types.ModuleType("rmm.allocators.torch")
        sys.modules["rmm.allocators.torch"].rmm_torch_allocator = kept[0]
        refused()
        """)
    unnamed, named = (one for one in printed.splitlines() if one.startswith("PyTorch has"))
    assert "has another allocator already, whose back end is 'pluggable', and only one" in unnamed
    assert "already, rmm.allocators.torch.rmm_torch_allocator, and only one can be" in named
    assert "or set ESPER_ALLOC=0" in named


@pytest.mark.parametrize(
    "begin, conf, why",
    [
        (WITHOUT_TORCH, "", "needs PyTorch"),
        pytest.param("", "garbage:1", "garbage", marks=needs_shim),
        pytest.param("", "backend:cudaMallocAsync", "PyTorch was started with", marks=needs_shim),
    ],
)
def test_the_variable_where_it_cannot_be_warns_and_imports(begin, conf, why):
    printed = run(begin + "import esper_alloc", ESPER_ALLOC="1", PYTORCH_CUDA_ALLOC_CONF=conf)
    assert "ESPER_ALLOC=1, but PyTorch keeps its own allocator: " in printed and why in printed


def test_variable_with_another_value_is_named():
    printed = run(
        """
        import esper_alloc
        print(refusal(ValueError, esper_alloc.enable))
        """,
        ESPER_ALLOC="yes",
    )
    assert printed.count("ESPER_ALLOC=yes is neither 0 nor 1") == 2


@needs_shim
def test_variable_enables_at_import():
    printed = run(
        """
        import esper_alloc, torch
        assert esper_alloc.is_enabled()
        assert torch.cuda.get_allocator_backend() == "esper_alloc"
        """,
        ESPER_ALLOC="1",
    )
    assert printed == ""


@pytest.mark.slow
@needs_shim
@pytest.mark.parametrize(
    "name, value, words",
    [
        ("ESPER_ALLOC_ALLOWANCE", "fast",
         "is not a size: use bytes, a size such as 128MiB, 1 GiB or 512M, or off"),
        ("ESPER_ALLOC_SEGMENTS", "big", "is not a kind of segments: use auto, mapped or classic"),
        ("ESPER_ALLOC_USES", "some", "is not a kind of uses: use marked or automatic"),
    ],
)  # fmt: skip
def test_values_that_nobody_knows_are_named_at_once(name, value, words):
    """Not when CUDA starts, which without a GPU it never does."""
    run(
        f"""
        import esper_alloc
        for call in (esper_alloc.enable, esper_alloc.allocator, esper_alloc.pluggable_allocator):
            said = refusal(ValueError, call)
            assert said == "{name}={value} {words}", said
        assert not esper_alloc.is_enabled()
        import torch
        assert torch.cuda.get_allocator_backend() == "native"
        """,
        **{name: value},
    )
    printed = run("import esper_alloc", ESPER_ALLOC="1", **{name: value})
    assert f"PyTorch keeps its own allocator: {name}={value} {words}" in printed
    run("import esper_alloc; esper_alloc.enable()", **{name: ""})
    good = {"ALLOWANCE": "off", "SEGMENTS": "classic", "USES": "automatic"}[name.split("_")[-1]]
    stays = f"import os, esper_alloc; esper_alloc.enable(); assert os.environ[{name!r}] == {good!r}"
    run(stays, **{name: good})


# The swap, which needs no GPU


@pytest.mark.parametrize(
    "name, kind, backend",
    [
        pytest.param("allocator", "_CUDAAllocator", "esper_alloc", marks=needs_shim),
        pytest.param("pluggable_allocator", "CUDAPluggableAllocator", "pluggable",
                     marks=[needs_core, needs_cuda_torch]),
    ],
)  # fmt: skip
def test_swap(name, kind, backend):
    run_beside_torch(f"""
        import torch, esper_alloc
        ours = esper_alloc.{name}()
        assert ours is esper_alloc.{name}()
        assert isinstance(ours, torch.cuda.memory.{kind})
        assert not esper_alloc.is_enabled()
        assert torch.cuda.get_allocator_backend() == "native"
        torch.cuda.memory.change_current_allocator(ours)
        assert esper_alloc.is_enabled()
        esper_alloc.enable()
        assert torch.cuda.get_allocator_backend() == {backend!r}
        esper_alloc.record_use(torch.ones(3))
        """)


@needs_shim
def test_shim_knows_what_it_was_built_for():
    import torch

    from esper_alloc.installation.pytorch import load_shim

    assert load_shim().built_for() == ".".join(torch.__version__.split(".")[:2])


@needs_shim
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_pytorchs_other_backend_stays_and_the_error_says_so(name):
    run(
        """
        import os, torch, esper_alloc
        [name] = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(os.environ)
        for ask in (esper_alloc.enable, esper_alloc.allocator):
            said = refusal(esper_alloc.UnavailableError, ask)
            assert f"remove backend:cudaMallocAsync from {name}." in said, said
        assert not esper_alloc.is_enabled()
        assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
        """,
        **{name: "max_split_size_mb:64,backend:cudaMallocAsync"},
    )


@needs_shim
def test_enable_after_cuda_started_says_so():
    run_beside_torch("""
        import os, torch, esper_alloc
        torch.cuda.is_initialized = lambda: True
        said = refusal(RuntimeError, esper_alloc.enable)
        assert "came too late: CUDA is initialised" in said, said
        assert "python -m esper_alloc run" in said, said
        said = refusal(RuntimeError, lambda: esper_alloc.enable(allowance=0, uses="automatic"))
        assert "came too late" in said, said
        assert not {"ESPER_ALLOC_ALLOWANCE", "ESPER_ALLOC_USES"} & set(os.environ)
        assert not esper_alloc.is_enabled()
        assert torch.cuda.get_allocator_backend() == "native"
        """)


# Choices


@pytest.mark.parametrize(
    "argument, names",
    [
        ("uses", "marked or automatic"),
        ("allowance", "bytes, a size such as 128MiB, 1 GiB or 512M, or off"),
        ("segments", "auto, mapped or classic"),
    ],
)
@pytest.mark.parametrize("value", ["x", "", -3, True, 1.5, []])
def test_a_choice_that_there_is_not_is_an_error_at_once(argument, names, value, monkeypatch):
    """Before anything else is looked at: without torch, too."""
    monkeypatch.setitem(sys.modules, "torch", None)
    before = dict(os.environ)
    with pytest.raises(ValueError) as caught:
        esper_alloc.enable(**{argument: value})
    assert str(caught.value).startswith(f"{argument}={value!r} is not a ")
    assert str(caught.value).endswith(f": use {names}")
    assert dict(os.environ) == before


def test_required_is_a_bool():
    with pytest.raises(TypeError, match="required must be True or False, not str"):
        esper_alloc.enable(required="no")


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, "off"), ("off", "off"), (0, "0"), (1 << 20, "1048576"), ("7 K", "7 K")],
)
def test_an_allowance_is_given_as_a_size_or_off(given, found):
    assert choices.ALLOWANCE.given(given) == found


@needs_shim
def test_choices_are_handed_to_the_core_and_to_children_and_kept():
    run_beside_torch("""
        import os, torch, esper_alloc
        from esper_alloc.torch_allocator.sizes import parse_size
        esper_alloc.enable(allowance="1 GiB", segments="classic")
        assert os.environ["ESPER_ALLOC_ALLOWANCE"] == "1 GiB"
        assert os.environ["ESPER_ALLOC_SEGMENTS"] == "classic"
        assert "ESPER_ALLOC_USES" not in os.environ
        esper_alloc.enable()
        for same in ("1024M", 1 << 30):
            esper_alloc.enable(allowance=same)
        for late in ({"allowance": None}, {"allowance": 0}, {"segments": "auto"}):
            said = refusal(RuntimeError, lambda: esper_alloc.enable(**late, uses="automatic"))
            assert "enabled already, with " in said, said
        assert parse_size(os.environ["ESPER_ALLOC_ALLOWANCE"]) == 1 << 30
        assert os.environ["ESPER_ALLOC_SEGMENTS"] == "classic"
        assert "ESPER_ALLOC_USES" not in os.environ
        """)


@needs_shim
@pytest.mark.parametrize(
    "segments, set_before, found",
    [("", None, "1"), ("mapped", None, "1"), ("classic", None, None), ("", "0", "0")],
)
def test_nccl_leaves_pages_to_their_device(segments, set_before, found, monkeypatch):
    """Within one process; what the user says of it stands."""
    monkeypatch.delenv("NCCL_P2P_DIRECT_DISABLE", raising=False)
    before = {} if set_before is None else {"NCCL_P2P_DIRECT_DISABLE": set_before}
    printed = run_beside_torch(
        """
        import os, esper_alloc
        esper_alloc.enable()
        print(os.environ.get("NCCL_P2P_DIRECT_DISABLE"))
        """,
        ESPER_ALLOC_SEGMENTS=segments,
        **before,
    )
    assert printed == f"{found}\n"


@needs_shim
@pytest.mark.parametrize(
    "given, named",
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments: False"),
    ],
)
def test_pytorchs_option_counts_more_than_the_variable(given, named, monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DIRECT_DISABLE", raising=False)
    mapped = "True" in named
    run(
        f"""
        import os, esper_alloc
        said = refusal(ValueError, lambda: esper_alloc.enable(segments={"classic" if mapped else "mapped"!r}))
        assert "contradicts {named.replace(" ", "")} in" in said, said
        assert not esper_alloc.is_enabled()
        esper_alloc.enable()
        assert os.environ.get("NCCL_P2P_DIRECT_DISABLE") == {"1" if mapped else None!r}
        """,
        ESPER_ALLOC_SEGMENTS="classic" if mapped else "mapped",
        **{given: named},
    )


@needs_shim
def test_uses_cannot_be_automatic_behind_function_pointers():
    run_beside_torch("""
        import torch, esper_alloc
        torch.cuda.memory.change_current_allocator(esper_alloc.pluggable_allocator())
        esper_alloc.enable(uses="marked")
        said = refusal(RuntimeError, lambda: esper_alloc.enable(uses="automatic"))
        assert "cannot be automatic on pluggable_allocator()" in said, said
        """)


@needs_shim
def test_without_a_driver_the_error_names_it():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    run_beside_torch("""
        import torch, esper_alloc
        esper_alloc.enable()
        for call in (lambda: torch._C._cuda_memoryStats(0),
                     lambda: torch._C._cuda_emptyCache()):
            said = refusal(RuntimeError, call)
            assert "esper_alloc cannot serve this process: " in said, said
        """)


@needs_core
def test_library_exports_the_c_functions():
    library = ctypes.CDLL(esper_alloc.library_path())
    names = "malloc free record_use record_stream touch init reset set_memory_fraction base"
    for name in (*names.split(), "set_record_stream_visible"):
        assert getattr(library, f"esper_alloc_{name}")


def test_automatic_uses_of_the_environment_come_with_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turned: list[bool] = []
    shim = types.SimpleNamespace(automatic_uses=turned.append, allocator=object)
    monkeypatch.setenv("ESPER_ALLOC_USES", "automatic")
    monkeypatch.setattr(enabling, "load_shim", lambda: shim)
    monkeypatch.setattr(enabling.automatic_uses, "install", lambda compiled: turned.append(False))
    enabling.allocator.__wrapped__()
    assert turned == [True, False]
    with pytest.raises(RuntimeError, match=r"cannot be automatic on pluggable_allocator"):
        enabling.pluggable_allocator.__wrapped__()
