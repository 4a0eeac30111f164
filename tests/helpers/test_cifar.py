"""CIFAR's files, read by torchvision: with archives of our own in place of the published ones."""

import functools
import hashlib
import pickle
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from esper_alloc import SharedGPUGatherBatchIterator, UnavailableError  # noqa: E402
from esper_alloc.helpers.gather import cifar  # noqa: E402

NAMES = {"cifar10": "labels", "cifar100": "fine_labels"}


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("torchvision.datasets")


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def publish(folder: Path, name: str, datasets: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes small files as they are published, and lets torchvision expect them: what
    they hold."""
    reader = getattr(datasets, name.upper())
    content = folder / reader.base_folder
    content.mkdir(parents=True)
    random = numpy.random.default_rng(0)
    sets = []
    for attribute in ("train_list", "test_list"):
        listed, pixels, labels = [], [], []
        for file, _ in getattr(reader, attribute):
            rows = random.integers(0, 256, (4, 3072), dtype=numpy.uint8)
            here = random.integers(0, 10, 4).tolist()
            (content / file).write_bytes(pickle.dumps({"data": rows, NAMES[name]: here}))
            listed.append([file, md5(content / file)])
            pixels.append(torch.from_numpy(rows).view(4, 3, 32, 32))
            labels += here
        monkeypatch.setattr(reader, attribute, listed)
        sets.append((torch.cat(pixels), torch.tensor(labels)))
    meta = content / reader.meta["filename"]
    meta.write_bytes(pickle.dumps({reader.meta["key"]: ["a class"]}))
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": md5(meta)})
    return sets


@pytest.mark.parametrize("name", NAMES)
def test_published_files_are_read(
    name: str, datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = publish(tmp_path, name, datasets, monkeypatch)
    for train, (images, labels) in zip((True, False), sets):
        got = cifar.read(name, tmp_path, train)
        assert torch.equal(got[0], images) and torch.equal(got[1], labels)
        assert got[0].dtype == torch.uint8 and got[1].dtype == torch.int64
        assert got[0].is_contiguous()


def test_damaged_and_missing_files_are_refused(
    datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, "cifar10", datasets, monkeypatch)
    folder = tmp_path / "cifar-10-batches-py"
    file = folder / "test_batch"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="cifar-10-batches-py does not hold the files of CIFAR-10"):
        cifar.read("cifar10", tmp_path, True)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="expected as .*test_batch: unpack https"):
        cifar.read("cifar10", tmp_path, True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serves tmp_path/source."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "source"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_downloading_when_asked(
    server: str, datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a server of this machine in place of the published address."""
    source, root = tmp_path / "source", tmp_path / "root"
    sets = publish(source, "cifar10", datasets, monkeypatch)
    archive = source / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(source / "cifar-10-batches-py", "cifar-10-batches-py")
    monkeypatch.setattr(datasets.CIFAR10, "url", f"{server}/{archive.name}")
    given = {"batch_size_per_env": 2, "n_envs": 1, "env_devices": ["cpu"], "shuffle": False}
    for checksum, right in (("0" * 32, False), (md5(archive), True)):
        monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", checksum)
        if right:
            SharedGPUGatherBatchIterator(**given, seed=1, data_root=root, download=True)
        else:
            with pytest.raises(ValueError, match="did not give CIFAR-10 as it was published"):
                SharedGPUGatherBatchIterator(**given, seed=1, data_root=root, download=True)
    assert torch.equal(cifar.read("cifar10", root, True)[0], sets[0][0])
    archive.unlink()
    cifar.download("cifar10", root)  # it is there already


def test_without_torchvision_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torchvision", "torchvision.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (
        lambda: cifar.read("cifar10", tmp_path, True),
        lambda: cifar.download("cifar10", tmp_path),
    ):
        with pytest.raises(
            UnavailableError, match="reading CIFAR-10 needs torchvision.*goes with torch 2"
        ):
            call()
