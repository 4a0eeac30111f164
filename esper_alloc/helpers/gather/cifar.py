"""CIFAR-10 and CIFAR-100 from their published files.

The files are pickles. They are read by an unpickler that admits the few names
which an array of bytes and a list of numbers need, and builds those itself: a
file can name no other function, and NumPy is not needed.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

__all__ = ["CIFAR", "Cifar", "download", "read"]

#: Bytes of an image: 3 channels (red, green, blue) of 32 rows of 32 pixels.
_IMAGE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets, as published on https://www.cs.toronto.edu/~kriz/cifar.html.

    Attributes:
        mean, std: of each channel over the training set's pixels / 255.
    """

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str
    classes: int
    url: str
    md5: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def files(self, root: str | os.PathLike[str], train: bool) -> list[Path]:
        """Where the files of the training or the test set are expected."""
        folder = Path(root).expanduser() / self.folder
        return [folder / name for name in (self.train if train else self.test)]


#: By name.
CIFAR: dict[str, Cifar] = {
    "cifar10": Cifar(
        name="CIFAR-10",
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        labels="labels",
        classes=10,
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Cifar(
        name="CIFAR-100",
        folder="cifar-100-python",
        train=("train",),
        test=("test",),
        labels="fine_labels",
        classes=100,
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def find(name: str) -> Cifar:
    """The data set of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in CIFAR:
        raise ValueError(f"dataset must be one of {', '.join(CIFAR)} (got {name!r})")
    return CIFAR[name]


def read(name: str, root: str | os.PathLike[str], train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The training or the test set.

    Args:
        name: "cifar10" or "cifar100".
        root: the folder that the published archive was unpacked in.

    Returns:
        images [N, 3, 32, 32] uint8 and labels [N] int64 (of CIFAR-100 the fine
        ones), on the CPU.

    Raises:
        FileNotFoundError: a file is missing; says where it is expected.
        ValueError: a file is not what was published; names it.
    """
    import torch

    dataset = find(name)
    files = dataset.files(root, train)
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{dataset.name} is expected as {missing[0].resolve()}: unpack {dataset.url} in "
            f"{Path(root).expanduser().resolve()}, pass another data_root, or ask for the "
            f"download with download=True"
        )
    parts = [_read_file(dataset, path) for path in files]
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def download(name: str, root: str | os.PathLike[str]) -> None:
    """Fetches the published archive and unpacks it in `root`, unless its files are there.

    Raises:
        ValueError: what came is not what was published.
        OSError: it could not be fetched or written.
    """
    dataset = find(name)
    wanted = [*dataset.files(root, True), *dataset.files(root, False)]
    if all(path.is_file() for path in wanted):
        return
    folder = wanted[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as archive:
        digest = hashlib.md5(usedforsecurity=False)
        with urllib.request.urlopen(dataset.url, timeout=60) as source:
            while piece := source.read(1 << 20):
                digest.update(piece)
                archive.write(piece)
        if digest.hexdigest() != dataset.md5:
            raise ValueError(
                f"{dataset.url} is not the published archive: its MD5 is {digest.hexdigest()}, "
                f"expected {dataset.md5}. Try again, or fetch it by hand"
            )
        archive.seek(0)
        with tarfile.open(fileobj=archive, mode="r:gz") as packed:
            for path in wanted:
                _unpack(packed, f"{dataset.folder}/{path.name}", path)


def _unpack(packed: tarfile.TarFile, member: str, target: Path) -> None:
    """One file of the archive, by its name alone: no path in it is followed."""
    source = packed.extractfile(member)
    if source is None:
        raise ValueError(f"{member} is missing in the archive, or not a file")
    # Under its name only when complete, so that nobody reads half a file.
    scratch = target.with_name(f"{target.name}.{os.getpid()}.new")
    scratch.write_bytes(source.read())
    scratch.replace(target)


def _read_file(dataset: Cifar, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    def odd(why: str) -> NoReturn:
        raise ValueError(f"{path} is not a file of {dataset.name} as it was published: {why}")

    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        odd(str(error) or type(error).__name__)
    if not isinstance(content, dict):
        odd(f"it holds a {type(content).__name__}, and no dict")
    entries = {key.decode() if isinstance(key, bytes) else key: content[key] for key in content}
    data, labels = entries.get("data"), entries.get(dataset.labels)
    if not isinstance(data, _Array) or not isinstance(labels, list):
        odd(f"it has no array 'data' or no list {dataset.labels!r}")
    count = len(labels)
    if data.dtype != "u1" or data.shape != (count, _IMAGE_BYTES):
        odd(f"'data' has shape {data.shape} of {data.dtype} for {count} labels")
    if len(data.content) != count * _IMAGE_BYTES:
        odd(f"'data' has {len(data.content)} bytes for {count} images")
    if not all(type(label) is int and 0 <= label < dataset.classes for label in labels):
        odd(f"a label is not one of 0 to {dataset.classes - 1}")
    if count == 0:
        return torch.empty(0, *_IMAGE, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    pixels = torch.frombuffer(bytearray(data.content), dtype=torch.uint8)
    if data.fortran:
        pixels = pixels.view(_IMAGE_BYTES, count).t().contiguous()
    return pixels.view(count, *_IMAGE), torch.tensor(labels, dtype=torch.int64)


# What the pickles may name, and what is made of it


class _Dtype:
    """numpy.dtype("u1", ...): its name is all that is kept."""

    def __init__(self, name: str | bytes, *_: Any) -> None:
        self.name = _text(name)

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment of single bytes


class _Array:
    """A NumPy array of bytes, as its pickle describes it."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self.content = b""
        self.fortran = False

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        self._fill(content, dtype, shape, bool(fortran))

    def _fill(self, content: Any, dtype: Any, shape: Any, fortran: bool) -> None:
        if not isinstance(dtype, _Dtype) or not isinstance(content, (bytes, bytearray)):
            raise pickle.UnpicklingError("it contains an array that is not of bytes")
        self.shape = tuple(shape)
        self.dtype, self.content, self.fortran = dtype.name, bytes(content), fortran


def _text(name: str | bytes) -> str:
    return name.decode("ascii") if isinstance(name, bytes) else str(name)


class _ArrayType:
    """Stands for the class numpy.ndarray, which is only ever passed along."""


def _reconstruct(kind: Any, *_: Any) -> _Array:
    if kind is not _array_type:
        raise pickle.UnpicklingError("it contains an array of another class than numpy.ndarray")
    return _Array()


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array._fill(content, dtype, shape, _text(order) == "F")
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    """_codecs.encode, by which Python 3 writes bytes in old protocols."""
    if not isinstance(text, str) or _text(encoding) != "latin1":
        raise pickle.UnpicklingError(
            "it contains text in another encoding than the published files"
        )
    return text.encode("latin-1")


class _Admitted:
    """What a file gets for a name: it can call it, and can set no attribute of it,
    which pickles otherwise may do to any class or function."""

    __slots__ = ("_what",)

    def __init__(self, what: Any) -> None:
        self._what = what

    def __call__(self, *arguments: Any) -> Any:
        return self._what(*arguments)

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("it sets the state of an object that these files only name")


_array_type = _Admitted(_ArrayType)

#: NumPy 2 moved its modules; the published files have the old names.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _array_type,
    ("numpy", "dtype"): _Admitted(_Dtype),
    ("numpy.core.multiarray", "_reconstruct"): _Admitted(_reconstruct),
    ("numpy._core.multiarray", "_reconstruct"): _Admitted(_reconstruct),
    ("numpy.core.numeric", "_frombuffer"): _Admitted(_frombuffer),
    ("numpy._core.numeric", "_frombuffer"): _Admitted(_frombuffer),
    ("_codecs", "encode"): _Admitted(_encode),
}


class _Unpickler(pickle.Unpickler):
    """Admits what the published files need and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which these files do not need"
            ) from None

    def persistent_load(self, identity: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside the file")
