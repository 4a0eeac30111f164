"""`python -m esper_alloc run`: a program runs as if directly, on esper_alloc,
and so do the Pythons that it starts.

Most tests use a stand-in for the package that only notes whether its import
would have enabled it, and a stand-in for torch: then what is tested is how a process is
reached, on any machine and in milliseconds. The command itself, its startup
directory and the main module are the real ones. The last tests use the real
torch and the real package where both are there.
"""

import ast
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import ROOT, python

PACKAGE = ROOT / "esper_alloc"

FAKE_PACKAGE = """
import os
__version__ = "0.0-fake"
calls = 0
if os.environ.get("ESPER_ALLOC") == "1":
    import torch
    assert torch.version.cuda, "torch is there, and complete"
    calls += 1
"""

FAKE_TORCH = """
class version:
    cuda = "13.0"
"""

# What a script prints when it wants to be asked whether esper_alloc is on.
REPORT = """
import sys
import torch
package = sys.modules.get("esper_alloc")
print("enabled", package.calls if package else None)
"""


class Place:
    """A directory with the package, a torch, and room for scripts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.site = path / "site"
        package = self.site / "esper_alloc"
        package.mkdir(parents=True)
        shutil.copy(PACKAGE / "__main__.py", package / "__main__.py")
        for folder in ("_startup", "cli", "installation", "recorder", "torch_allocator"):
            shutil.copytree(PACKAGE / folder, package / folder)
        self.package = self.write("site/esper_alloc/__init__.py", FAKE_PACKAGE)
        self.torch = self.write("torch_site/torch/__init__.py", FAKE_TORCH)
        self.built_for("9.9")
        self.install_torch("9.9.1+cu130")
        self.environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("ESPER_", "PYTHON"))
        }
        self.environment["PYTHONPATH"] = f"{self.site}{os.pathsep}{path / 'torch_site'}"

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def script(self, text: str) -> Path:
        return self.write("script.py", text)

    def built_for(self, *torches: str) -> None:
        self.write(
            "site/esper_alloc/_build.py",
            f"""
            BUILT_FOR = {{torch: "13.0" for torch in {torches!r}}}
            HAS_KERNELS = {torches != ()}
            WHAT_IS_MISSING = []
            """,
        )

    def install_torch(self, version: str) -> None:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        self.write("torch_site/torch-9.dist-info/METADATA", metadata)

    def python(self, *command: object, **options: object) -> subprocess.CompletedProcess[str]:
        return python(*command, env=self.environment, **{"cwd": self.path, **options})

    def run(self, *command: object, **options: object) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "esper_alloc", "run", *command, **options)


@pytest.fixture
def place(tmp_path: Path, driver: None) -> Place:
    return Place(tmp_path)


# --- as if run directly ----------------------------------------------------


def test_script_sees_what_it_sees_when_run_directly(place: Place) -> None:
    script = place.script("""
        import json, os, sys
        import __main__
        print(json.dumps({
            "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__,
            "main": __main__.__file__, "spec": __spec__, "package": __package__,
            "flags": [sys.flags.optimize, sys.flags.dev_mode],
            "modules": sorted(m for m in sys.modules if "esper" in m or "runpy" in m),
            "customize": "sitecustomize" in sys.modules,
        }))
        """)
    for arguments in (
        ["--lr", "3", "-m", "x", "--", "--allowance", "y", "", "a b"],
        ["--", "--lr", "3"],
    ):
        direct = place.python("-O", "-X", "dev", script, *arguments)
        ours = place.python("-O", "-X", "dev", "-m", "esper_alloc", "run", script, *arguments)
        assert direct.returncode == 0, direct.stderr
        # Some systems bring a sitecustomize of their own: then nothing may differ at all.
        assert ours.stdout == direct.stdout.replace('"customize": false', '"customize": true')
        assert ours.stderr == direct.stderr
    assert place.run("--", script, "a").stdout == place.run(script, "a").stdout


def test_module_sees_what_it_sees_when_run_directly(place: Place) -> None:
    place.write("kit/__init__.py", "")
    place.write(
        "kit/job.py",
        """
        import sys
        print(sys.argv, sys.path, __name__, __package__, __spec__.name)
        """,
    )
    direct = place.python("-m", "kit.job", "-m", "--allowance", "q")
    ours = place.run("--allowance", "off", "-m", "kit.job", "-m", "--allowance", "q")
    assert direct.returncode == 0, direct.stderr
    assert ours.stdout == direct.stdout


def test_script_from_standard_input(place: Place) -> None:
    done = place.run("-", "one", input="import sys; print(sys.argv)")
    assert done.stdout == "['-', 'one']\n"


@pytest.mark.parametrize(
    "body, code",
    [
        ("pass", 0), ("import sys; sys.exit(7)", 7), ("raise SystemExit('words')", 1),
        ("def f():\n  return 1 / 0\nf()", 1), ("import os; os._exit(9)", 9), ("def broken(:", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM), (None, 2),
    ],
)  # fmt: skip
def test_exit_code_and_traceback_are_those_of_a_direct_run(
    place: Place, body: str | None, code: int
) -> None:
    script = "nowhere.py" if body is None else place.script(body)
    direct, ours = place.python(script), place.run(script)
    assert direct.returncode == code
    assert (ours.returncode, ours.stdout, ours.stderr) == (code, direct.stdout, direct.stderr)


def test_interrupt_reaches_the_script(place: Place) -> None:
    script = place.script("""
        import os, time
        try:
            print("pid", os.getpid(), flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise SystemExit(5)
        """)
    with subprocess.Popen(
        [sys.executable, "-m", "esper_alloc", "run", str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=place.environment,
        cwd=place.path,
        # Jobs in the background inherit an ignored SIGINT, this one must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"pid {process.pid}\n"  # no process in between
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(timeout=600) == 5


# --- esper_alloc is on, everywhere -----------------------------------------


def test_enabled_once_torch_is_imported_and_not_before(place: Place) -> None:
    script = place.script("""
        import sys
        assert "esper_alloc" not in sys.modules
        import importlib.util
        assert importlib.util.find_spec("torch") is not None  # asking is not importing
        assert "esper_alloc" not in sys.modules
        import torch
        import torch as again
        assert type(torch.__loader__).__name__ == "SourceFileLoader"
        assert "exec_module" not in vars(torch.__loader__)
        assert "TorchWatch" not in [type(finder).__name__ for finder in sys.meta_path]
        print("enabled", sys.modules["esper_alloc"].calls)
        """)
    done = place.run(script)
    assert (done.stdout, done.stderr) == ("enabled 1\n", "")


def test_children_have_it_too(place: Place) -> None:
    place.write("report.py", REPORT)
    script = place.script("""
        import multiprocessing, subprocess, sys, os
        def work():
            import report
            sys.stdout.flush()
        if __name__ == "__main__":
            command = [sys.executable, "report.py"]
            nested = f"import subprocess, sys; subprocess.run({command!r}, check=True)"
            subprocess.run(command, check=True)
            subprocess.run([sys.executable, "-c", nested], check=True)  # a grandchild
            for method in ("spawn", "forkserver", "fork"):
                context = multiprocessing.get_context(method)
                process = context.Process(target=work)
                process.start()
                process.join()
                assert process.exitcode == 0, method
            subprocess.run(command, env={**os.environ, "ESPER_ALLOC": "0"}, check=True)
        """)
    done = place.run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "enabled 1\n" * 5 + "enabled None\n"
    assert done.stderr == ""


def test_a_run_within_a_run_adds_nothing(place: Place) -> None:
    script = place.script("import os; print(os.environ['PYTHONPATH'])")
    once = place.run(script).stdout
    assert place.run("-m", "esper_alloc", "run", script).stdout == once
    assert once.count("_startup") == 1


@pytest.mark.parametrize(
    "option, variable, names",
    [
        ("--allowance", "ESPER_ALLOC_ALLOWANCE", ("off", "1 GiB")),
        ("--black-box", "ESPER_ALLOC_BLACK_BOX", ("off", "1 GiB")),
        ("--segments", "ESPER_ALLOC_SEGMENTS", ("classic", "mapped")),
        ("--uses", "ESPER_ALLOC_USES", ("automatic", "marked")),
    ],
)
def test_choices_are_handed_on(
    place: Place, option: str, variable: str, names: tuple[str, str]
) -> None:
    script = place.script(
        f"import os; print(os.environ.get({variable!r}), os.environ['ESPER_ALLOC'])"
    )
    assert place.run(script).stdout == "None 1\n"
    assert place.run(option, names[0], script).stdout == f"{names[0]} 1\n"
    place.environment[variable] = names[0]
    assert place.run(script).stdout == f"{names[0]} 1\n"
    assert place.run(option, names[1], script).stdout == f"{names[1]} 1\n"


def test_a_command_on_path_is_found_behind_a_file_of_its_name(place: Place) -> None:
    command = place.write("bin/serve", "#!/usr/bin/env python3\nimport torch, sys; print(sys.argv)")
    command.chmod(0o755)
    place.environment["PATH"] = f"{command.parent}{os.pathsep}{place.environment['PATH']}"
    assert place.run("serve", "-m", "x").stdout == f"{[str(command), '-m', 'x']}\n"
    place.write("serve", "print('the file')")
    assert place.run("serve").stdout == "the file\n"
    assert "No such file" in place.run("nobody's").stderr


def test_a_command_that_is_no_python_is_refused_and_a_folder_hides_none(place: Place) -> None:
    place.environment["PATH"] = f"{place.path / 'bin'}{os.pathsep}{place.environment['PATH']}"
    # As pip writes it where the interpreter's path has a space.
    for_shell = "#!/bin/sh\n'''exec' \"/a b/python\" \"$0\" \"$@\"\n' '''\nprint('serves')"
    place.write("bin/serve", for_shell).chmod(0o755)
    place.write("bin/launch", "#!/bin/bash\n# python\n").chmod(0o755)
    place.write("serve/__init__.py", "")
    assert place.run("serve").stdout == "serves\n"
    done = place.run("launch", "x")
    assert done.returncode == 2 and "launch is no Python command: start it without" in done.stderr
    place.write("serve/__main__.py", "print('the folder')")
    assert place.run("serve").stdout == "the folder\n"


@pytest.mark.parametrize(
    "option, variable",
    [("--monitor", "ESPER_ALLOC_MONITOR"), ("--memory-saver", "ESPER_ALLOC_MEMORY_SAVER")],
)
def test_switches_are_handed_on(place: Place, option: str, variable: str) -> None:
    script = place.script(f"import os; print(os.environ.get({variable!r}))")
    assert place.run(script).stdout == "None\n"
    assert place.run(option, script).stdout == "1\n"
    place.environment[variable] = "yes"
    done = place.run(script)
    assert done.returncode == 2 and f"{variable}=yes is neither on nor off" in done.stderr


def test_package_of_the_child_python_comes_first_else_the_one_that_ran(place: Place) -> None:
    script = place.script("import torch, sys; print(sys.modules['esper_alloc'].__file__)")
    # Started in a source directory: only the current directory leads to it.
    place.environment["PYTHONPATH"] = str(place.path / "torch_site")
    done = place.run(script, cwd=place.site)
    assert done.stdout == f"{place.package}\n", done.stderr
    other = place.write("other/esper_alloc/__init__.py", FAKE_PACKAGE)
    place.environment["PYTHONPATH"] += os.pathsep + str(other.parent.parent)
    done = place.run(script, cwd=place.site)
    assert done.stdout == f"{other}\n", done.stderr


# --- and does no harm ------------------------------------------------------


def test_importing_the_package_before_torch_is_fine_too(place: Place) -> None:
    script = place.script("import esper_alloc\n" + REPORT)
    done = place.run(script)
    assert (done.stdout, done.stderr) == ("enabled 1\n", "")


@pytest.mark.parametrize("breakage", ["raise OSError('no such luck')", "import no_such_luck"])
def test_what_cannot_be_imported_is_said_and_the_program_goes_on(
    place: Place, breakage: str
) -> None:
    script = place.write("report.py", REPORT)
    place.package.write_text(FAKE_PACKAGE.replace("calls += 1", breakage))
    done = place.run(script)
    assert done.returncode == 0
    assert done.stdout == "enabled None\n"
    assert "keeps PyTorch's own allocator: " in done.stderr
    assert "no" in done.stderr and "such" in done.stderr and "luck" in done.stderr
    closed = place.run(script, preexec_fn=lambda: os.close(2))
    assert (closed.returncode, closed.stdout) == (0, "enabled None\n")


def test_a_python_without_the_package_uses_the_one_that_ran(place: Place) -> None:
    script = place.write("report.py", REPORT)
    startup = place.package.parent / "_startup"
    place.environment["PYTHONPATH"] = f"{startup}{os.pathsep}{place.path / 'torch_site'}"
    place.environment["ESPER_ALLOC"] = "1"
    done = place.python(script)
    assert (done.stdout, done.stderr) == ("enabled 1\n", "")


def test_torch_without_cuda_is_left_alone(place: Place) -> None:
    script = place.write("report.py", REPORT)
    place.torch.write_text("class version:\n    cuda = None\n")
    done = place.run(script)
    assert (done.stdout, done.stderr) == ("enabled None\n", "")


def test_a_torch_that_fails_to_import_fails_the_same_way(place: Place) -> None:
    place.torch.write_text("raise ImportError('libsomething.so: cannot open')\n")
    script = place.write("report.py", "import torch")
    direct, ours = place.python(script), place.run(script)
    assert ours.returncode == direct.returncode == 1
    assert ours.stderr.splitlines()[-1] == direct.stderr.splitlines()[-1]


def test_existing_sitecustomize_still_runs(place: Place) -> None:
    place.write("custom/sitecustomize.py", "import builtins; builtins.custom = __file__")
    place.environment["PYTHONPATH"] += os.pathsep + str(place.path / "custom")
    script = place.script(
        REPORT + "import builtins, sitecustomize\n"
        "print(builtins.custom == sitecustomize.__file__)\n"
        "print([entry for entry in sys.path if '_startup' in entry])",
    )
    done = place.run(script)
    assert (done.stdout, done.stderr) == ("enabled 1\nTrue\n[]\n", "")


@pytest.mark.parametrize("body", ["raise ValueError('custom')", "import no_such_module"])
def test_existing_sitecustomize_may_fail_as_before(place: Place, body: str) -> None:
    place.write("custom/sitecustomize.py", body)
    place.environment["PYTHONPATH"] += os.pathsep + str(place.path / "custom")
    script = place.write("report.py", REPORT)
    direct, ours = place.python(script), place.run(script)
    assert direct.returncode == ours.returncode
    assert ours.stdout == direct.stdout.replace("None", "1")
    assert ours.stderr.splitlines()[:1] == direct.stderr.splitlines()[:1]


def test_startup_file_has_no_new_syntax() -> None:
    source = (PACKAGE / "_startup" / "sitecustomize.py").read_text()
    ast.parse(source, feature_version=(3, 4))
    source.encode("ascii")  # Python 2 accepts nothing else without a declaration


@pytest.mark.parametrize("name", ["python2", "python2.7", "python3.6", "python3.8", "python3.9"])
def test_startup_file_is_harmless_in_old_pythons(place: Place, name: str) -> None:
    python = shutil.which(name)
    if python is None:
        pytest.skip(f"no {name} here")
    environment = {**place.environment, "ESPER_ALLOC": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = f"{PACKAGE / '_startup'}{os.pathsep}{place.path / 'torch_site'}"
    command = [python, "-c", "import torch, sys; print('esper_alloc' in sys.modules)"]
    if subprocess.run([python, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip(f"{name} does not start")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert (done.stdout, done.stderr) == ("False\n", "")


# --- refusals --------------------------------------------------------------


@pytest.mark.parametrize(
    "torch, built_for, why",
    [
        ("9.9.0+cu130", [], "installed without its PyTorch part"),
        ("9.9.0+rocm6.4", ["9.9"], "AMD GPUs"),
        ("2.10.1+cu130", ["9.9"], "torch 2.11 or newer, and this is torch 2.10.1+cu130"),
        ("9.9.0+cu130", ["nothing was built"],
         "source folder, where nothing was built: `cd` elsewhere"),
    ],
)  # fmt: skip
def test_nothing_is_run_where_it_cannot_be_on_esper_alloc(
    place: Place, torch: str, built_for: list[str], why: str
) -> None:
    place.install_torch(torch)
    place.built_for(*built_for)
    if built_for == ["nothing was built"]:
        (place.site / "esper_alloc" / "_build.py").unlink()
    done = place.run(place.script("print('ran')"))
    assert (done.returncode, done.stdout) == (1, "")
    assert why in done.stderr
    assert "python -m esper_alloc doctor" in done.stderr


@pytest.mark.parametrize("torch", ["9.8.0+cu130", "9.10.0"])
@pytest.mark.parametrize("by", ["option", "variable"])
def test_another_torch_is_refused_automatic_uses_only(place: Place, torch: str, by: str) -> None:
    place.install_torch(torch)
    place.built_for("9.9", "9.11")
    script = place.write("report.py", REPORT)
    done = place.run(script)  # enable() warns of it
    assert (done.returncode, done.stdout) == (0, "enabled 1\n")
    options = ["--uses", "automatic"] if by == "option" else []
    if by == "variable":
        place.environment["ESPER_ALLOC_USES"] = "automatic"
    done = place.run(*options, script)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"it was built for torch 9.9, 9.11, and this is torch {torch}" in done.stderr
    place.install_torch("9.11.2")
    assert place.run(*options, script).returncode == 0


def test_a_torch_without_cuda_is_no_reason_to_refuse(place: Place) -> None:
    place.install_torch("9.9.0+cpu")
    place.built_for()
    place.torch.write_text("class version:\n    cuda = None\n")
    done = place.run(place.write("report.py", REPORT))
    said = (
        "esper_alloc run: torch 9.9.0+cpu is built without CUDA: PyTorch keeps its own allocator\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "enabled None\n", said)


@pytest.mark.parametrize("built", [True, False])
def test_the_switch_turns_run_off_and_that_is_said_once(place: Place, built: bool) -> None:
    """Whatever is wrong with the installation, or with the choices in the environment."""
    if not built:
        place.built_for()
    place.environment.update(ESPER_ALLOC="0", ESPER_ALLOC_USES="nonsense")
    place.write("report.py", REPORT)
    script = place.script("""
        import os, subprocess, sys, report
        import esper_alloc
        assert "_startup" not in os.environ["PYTHONPATH"]
        subprocess.run([sys.executable, "report.py"], check=True)
        sys.exit(3)
        """)
    done = place.run("--uses", "automatic", script)
    assert (done.returncode, done.stdout) == (3, "enabled None\n" * 2)
    assert done.stderr == (
        "esper_alloc run: ESPER_ALLOC=0 turns it off: PyTorch keeps its own allocator\n"
    )


def test_a_switch_that_is_neither_on_nor_off_is_refused(place: Place) -> None:
    place.environment["ESPER_ALLOC"] = "off"
    done = place.run(place.write("report.py", REPORT))
    assert (done.returncode, done.stdout) == (2, "")
    assert "esper_alloc run: ESPER_ALLOC=off is neither 0 nor 1: set one of them" in done.stderr


def test_a_machine_without_a_visible_gpu_is_said_once(place: Place) -> None:
    place.environment["CUDA_VISIBLE_DEVICES"] = ""
    done = place.run(place.write("report.py", REPORT))
    assert (done.returncode, done.stdout) == (0, "enabled 1\n")  # the package decides
    assert done.stderr == (
        "esper_alloc run: CUDA_VISIBLE_DEVICES hides every GPU: PyTorch keeps its own allocator\n"
    )


# --- usage -----------------------------------------------------------------


@pytest.mark.parametrize("flags", [["-I"], ["-E"], ["-S"]])
def test_interpreters_that_hide_the_environment_are_refused(place: Place, flags: list[str]) -> None:
    script = place.script("print('ran')")
    starter = f"import sys; sys.path.insert(0, {str(place.site)!r}); "
    starter += f"from esper_alloc.__main__ import main; sys.exit(main(['run', {str(script)!r}]))"
    done = place.python(*flags, "-c", starter)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "-I, -E and -S" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["--allowance", "x", "a.py"], ["--uses", "x", "a.py"], ["--what", "a.py"], ["-m"]],
)
def test_wrong_usage(place: Place, arguments: list[str]) -> None:
    done = place.run(*arguments)
    assert done.returncode == 2
    assert "usage: python -m esper_alloc" in done.stderr
    assert "ARGS\n" not in done.stderr  # a program needs none


@pytest.mark.parametrize(
    "variable, names",
    [
        ("ESPER_ALLOC_ALLOWANCE", "1 GiB or 512M, or off"),
        ("ESPER_ALLOC_SEGMENTS", "auto, mapped or classic"),
        ("ESPER_ALLOC_USES", "marked or automatic"),
    ],
)
def test_bad_values_of_the_environment_are_wrong_usage(
    place: Place, variable: str, names: str
) -> None:
    place.environment[variable] = "fast"
    done = place.run(place.script("print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"esper_alloc run: {variable}=fast is not a ")
    assert done.stderr.endswith(f"{names}\n") and done.stderr.count("\n") == 1
    if variable == "ESPER_ALLOC_ALLOWANCE":  # an option takes its place
        assert place.run("--allowance", "64M", place.script("")).returncode == 0


def test_record_names_a_file_for_each_process(place: Place, tmp_path: Path) -> None:
    code = """
    import os, subprocess, sys
    from esper_alloc.recorder import of_this_process
    named = os.environ["ESPER_ALLOC_RECORD"]
    print(named, of_this_process(named) == named, sep="\\n", flush=True)
    child = "import os, sys; from esper_alloc.recorder import of_this_process as of;"
    child += "print(of(sys.argv[1]) == f'{sys.argv[1][:-4]}{sys.argv[2]}-{os.getpid()}.box')"
    for rank in "", "-rank3":
        subprocess.run([sys.executable, "-c", child, named, rank], check=True)
        os.environ["RANK"] = "3"
        print(of_this_process(named), flush=True)
    """
    done = place.run("--record", f"{tmp_path}/job.box", place.script(code))
    assert done.stdout.split() == [
        f"{tmp_path}/job.box", "True", *2 * ["True", f"{tmp_path}/job-rank3.box"]
    ], done.stderr  # fmt: skip


@pytest.mark.parametrize(
    "options, why",
    [
        (["--record", "no/folder.box"], "--record no/folder.box: no file can be written there"),
        (["--record", "."], "--record .: no file can be written there"),
        (["--record", "job.py"], "--record job.py: no file can be written there"),
        (["--record", "/dev/null"], "--record /dev/null: no file can be written there"),
        (["--record", "a", "--black-box", "off"], "--record needs the black box, which"),
        *[([f"--allowance={size}"], f"--allowance: {size!r} is not a size: use bytes, a size such as "
           "128MiB, 1 GiB or 512M, or off") for size in ("", "-1", "128MB", "none")],
    ],
)  # fmt: skip
def test_options_that_cannot_be_followed_are_said_at_once(
    place: Place, options: list[str], why: str
) -> None:
    done = place.run(*options, place.script("print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert why in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "before, options",
    [
        (["-m", "esper_alloc"], []), (["-mesper_alloc"], []),
        (["-u", "-X", "dev", "-m", "esper_alloc"], ["-u", "-X", "dev"]),
        (["-um", "esper_alloc"], ["-u"]), (["-Oumesper_alloc"], ["-Ou"]),
        (["/opt/bin/esper-alloc"], []), (["-X", "dev", "/opt/bin/esper-alloc"], ["-X", "dev"]),
        (["-c", "code"], []), (["esper_alloc"], []), (["/opt/esper_alloc"], []), ([], []),
    ],
)  # fmt: skip
def test_interpreter_options_are_kept(before: list[str], options: list[str]) -> None:
    from esper_alloc.cli.run import interpreter_options

    arguments = ["run", "-m", "esper_alloc", "x"]
    orig_argv = ["python", *before, *arguments]
    assert interpreter_options(orig_argv, ["__main__.py", *arguments]) == options


# --- the real thing --------------------------------------------------------


def real_package_is_built() -> bool:
    try:
        from esper_alloc import _build
    except ImportError:
        return False
    return bool(_build.BUILT_FOR) and importlib.util.find_spec("torch") is not None


@pytest.mark.slow
@pytest.mark.skipif(not real_package_is_built(), reason="the extension for torch is not built")
def test_real_torch_has_the_real_allocator_in_parent_and_spawned_child(
    tmp_path: Path, driver: None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import multiprocessing, os, sys
            import torch
            def show(who):
                import esper_alloc
                assert not torch.cuda.is_initialized()
                print(who, esper_alloc.is_enabled(), flush=True)
            if __name__ == "__main__":
                assert "esper_alloc" in sys.modules, "not enabled by the import of torch"
                show("parent")
                child = multiprocessing.get_context("spawn").Process(target=show, args=("child",))
                child.start()
                child.join()
                sys.exit(child.exitcode)
            """)
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ESPER_")}
    environment["PYTHONPATH"] = str(ROOT)
    for devices, enabled in ((None, True), ("-1", False)):
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        done = python("-m", "esper_alloc", "run", script, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"parent {enabled}\nchild {enabled}\n", done.stderr
    assert done.stderr.count("\n") == 1 and "hides every GPU" in done.stderr
