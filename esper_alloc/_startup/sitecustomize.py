# sitecustomize.py: how `python -m esper_alloc run` reaches every process.
#
# `run` puts this directory in front of PYTHONPATH, so that each Python it
# starts, and each Python that those start, imports this file at startup. All
# that happens then is that a watch for the import of torch is set; the moment
# torch has been imported, and before CUDA can be initialised, esper_alloc
# becomes its allocator. A process that never imports torch pays for one more
# entry in sys.meta_path.
#
# Any Python may come by here, old ones and ones without esper_alloc included:
# hence no syntax newer than Python 2's, and no failure that leaves this file.
import os
import sys
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(HERE)


class TorchWatch(object):
    """A finder that finds nothing of its own: it lets the others find torch,
    and calls `then` once torch's module has been executed."""

    def __init__(self, then):
        self.then = then

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader):
        # The loader stays what it is, since resources and sources are read
        # through it. Each search makes a fresh one, so a program that only
        # asks whether torch exists changes nothing.
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            vars(loader).pop("exec_module", None)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self.then()

        loader.exec_module = exec_module


def import_package():
    """The esper_alloc of this Python, else the one that this file belongs to
    (`run` may have been started from a source directory)."""
    try:
        import esper_alloc  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", None) != "esper_alloc":
            raise
        import importlib.util

        spec = importlib.util.spec_from_file_location(
            "esper_alloc",
            os.path.join(PACKAGE, "__init__.py"),
            submodule_search_locations=[PACKAGE],
        )
        package = importlib.util.module_from_spec(spec)
        sys.modules["esper_alloc"] = package
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules["esper_alloc"]
            raise


def enable():
    """Makes esper_alloc the allocator of the torch that was just imported:
    with ESPER_ALLOC=1 its import does that, and warns where it cannot."""
    if os.environ.get("ESPER_ALLOC", "") in ("", "0"):
        return  # switched off for this process
    if "esper_alloc" in sys.modules:
        return  # its own import brought torch in, and goes on to enable itself
    if sys.modules["torch"].version.cuda is None:
        return  # a CPU build: there is nothing to replace
    try:
        with warnings.catch_warnings():
            # `run` has said it.
            warnings.filterwarnings("ignore", "esper_alloc does nothing here", RuntimeWarning)
            import_package()
    except Exception as error:
        if sys.stderr is not None:  # it is where it was closed
            sys.stderr.write(
                "esper_alloc: process %d keeps PyTorch's own allocator: %s\n" % (os.getpid(), error)
            )


def chain():
    """Runs the sitecustomize that would have been found without this one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401  (a module of that name further on)
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


if sys.version_info >= (3, 10):
    if "torch" in sys.modules:  # a .pth file was faster
        enable()
    else:
        sys.meta_path.insert(0, TorchWatch(enable))
chain()
