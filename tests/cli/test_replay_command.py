"""``python -m esper_alloc replay``: its table, its JSON, its plots, and what it refuses."""

import json
import os
import re
import shutil
import struct

import pytest
from histories import MIB, Recorder, snapshot_of, write
from processes import ROOT

from esper_alloc import _core
from esper_alloc.cli import replay as cli
from esper_alloc.cli.main import main

EXAMPLES = sorted((ROOT / "examples" / "traces").glob("*.pickle.gz"))


def command(*arguments) -> int:
    return main(["replay", *map(str, arguments)])


def test_json_is_exactly_the_documented_list(capsys):
    path = next(one for one in EXAMPLES if "fsdp_like" in one.name)
    assert command(path, "--segments", "all", "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    loaded = json.loads(out)
    assert [one["segments"] for one in loaded] == ["mapped", "classic"]
    keys = "file device segments recorded native replayed operations ns_per_operation device_calls"
    for one in loaded:
        assert list(one) == keys.split()
        assert one["file"] == str(path) and one["device"] == 0
        peaks = {"peak_allocated": 736 * MIB, "peak_active": 1056 * MIB}
        assert one["recorded"].items() >= peaks.items()
        assert one["replayed"].items() >= peaks.items()
        for column in ("recorded", "replayed"):
            assert set(one[column]) == {"peak_allocated", "peak_active", "peak_reserved"}
        assert set(one["native"]) == {"peak_allocated", "peak_active"}
        assert one["operations"] == 346 + 345
        assert type(one["ns_per_operation"]) is float and one["ns_per_operation"] > 0
        mapped = one["segments"] == "mapped"
        assert one["device_calls"]["page_map" if mapped else "memory_alloc"] > 0
        assert all(type(count) is int for count in one["device_calls"].values())


def test_the_table_has_what_it_should(capsys, tmp_path):
    recorder = Recorder()
    recorder.alloc(15 * MIB)
    path = write(tmp_path / "job", snapshot_of(recorder), compressed=True)
    assert command(path) == 0
    out = capsys.readouterr().out
    assert f"{path}, device 0: 2 entries, 1 operations" in out
    rows = {line.split("  ")[1]: line.split() for line in out.splitlines() if line.startswith("  ")}
    assert rows["recorded"][1:] == ["15.0", "MiB", "15.0", "MiB", "16.0", "MiB", "6.2%", "1"]
    assert rows["replayed mapped"][2:10] == rows["recorded"][1:9]
    assert rows["native's blocks"][2:] == ["16.0", "MiB", "16.0", "MiB"]
    assert "device calls" not in out
    assert command(path, "--verbose") == 0
    verbose = capsys.readouterr().out
    assert verbose.splitlines()[1].endswith("  device calls")
    [calls] = [line for line in verbose.splitlines() if "device calls of mapped" in line]
    assert ", page_create 1," in calls and ", page_map 1," in calls and "alloc" not in calls
    assert "classic" not in out
    assert command(path, "--segments", "classic", "--segments", "mapped") == 0
    both = capsys.readouterr().out
    assert both.index("replayed mapped") < both.index("replayed classic")


def test_the_documented_table_is_what_it_prints(capsys, monkeypatch):
    """All but the time of an operation."""
    monkeypatch.chdir(ROOT)
    document = (ROOT / "docs" / "replay.md").read_text()
    [(file, shown)] = re.findall(r"^\$ esper-alloc replay (\S+)\n(.*?)^```", document, re.M | re.S)
    assert command(file) == 0
    printed = capsys.readouterr().out
    there, here = (re.sub(r"(?m) +\d+$", "", text).strip() for text in (shown, printed))
    assert there == here


def test_a_bad_file_stops_everything_with_one_line(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    ran = []
    monkeypatch.setattr(cli, "replay", lambda *a: ran.append(a))
    bad = tmp_path / "bad"
    bad.write_bytes(b"nothing of the kind")
    picture = tmp_path / "picture.svg"
    assert command(EXAMPLES[0], bad, "--plot", picture) == 2
    out, err = capsys.readouterr()
    assert out == "" and not ran and not picture.exists()
    assert err.startswith(f"esper_alloc replay: {bad}: neither a memory snapshot nor ")
    assert err.count("\n") == 1


def test_wrong_usage(capsys, tmp_path):
    for arguments in [["x", "--segments", "auto"], ["x", "--device", "tpu"], []]:
        with pytest.raises(SystemExit) as caught:
            command(*arguments)
        assert caught.value.code == 2
    capsys.readouterr()
    assert command(EXAMPLES[0], "--plot", tmp_path / "picture.gif") == 2
    assert "must end in .png or .svg" in capsys.readouterr().err
    assert command("a.png", "--plot", "a.png") == 2
    assert "the picture would overwrite it" in capsys.readouterr().err


def test_without_a_gpu_cuda_is_refused_in_one_line(capsys):
    if _core.driver_report()["available"]:
        pytest.skip("there is a GPU here")
    assert command(EXAMPLES[0], "--device", "cuda") == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "CUDA" in err


# ---- plots -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [r"a$\evil{$b", "two\nlines\x1b[2J", os.fsdecode(b"\xff")])
def test_a_file_may_have_any_name(tmp_path, capsys, name):
    """matplotlib reads $...$ as mathematics; a terminal obeys control characters."""
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    shutil.copyfile(EXAMPLES[0], path)
    assert command(path, "--plot", tmp_path / "plot.svg") == 0
    shown = name.encode("unicode_escape").decode() if "$" not in name else name
    assert capsys.readouterr().out.startswith(f"{tmp_path}/{shown}, device 0: ")
    assert f"<!-- {shown}, device 0 -->" in (tmp_path / "plot.svg").read_text(encoding="utf-8")
    path.write_bytes(b"")
    assert command(path) == 2
    assert capsys.readouterr().err.startswith(f"esper_alloc replay: {tmp_path}/{shown}: not a ")


def test_a_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawing = tmp_path / "plot.svg"
    assert command(EXAMPLES[0], "--plot", drawing) == 0
    assert drawing.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    picture = tmp_path / "plot.png"
    assert command(*EXAMPLES, "--plot", picture) == 0
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 600
    before = drawing.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("matplotlib.backends.backend_svg.RendererSVG.finalize", interrupt)
    assert command(EXAMPLES[0], "--plot", drawing) == 130 and drawing.read_bytes() == before
