"""Open checkpoints: indexing a lazy tensor equals indexing the full tensor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same

WHOLE = torch.arange(7 * 300 * 2, dtype=torch.float32).reshape(7, 300, 2)
INDEXES: list[Any] = [
    *(0, -1, np.int64(3), True, None, (), [1, 2], (..., 1), (slice(0, 2), ..., slice(0, 1))),
    *(slice(None), slice(2, 5), slice(1, None, 3), slice(-3, -1), slice(5, 2), slice(100, 200)),
    *((slice(1, 3), 5), (2, slice(10, 20), 1)),
    *(torch.tensor([0, 3]), torch.tensor([True, False, True, False, False, False, True])),
]


@pytest.fixture(scope="module", params=["none", "lossless"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("open") / "ckpt"
    state = {"w": WHOLE, "view": WHOLE[3:5], "a": WHOLE.numpy().astype(np.float64), "s": torch.tensor(5.0)}
    # The last one has three blocks, the last of them short.
    state |= {"e": torch.empty(0, 3), "big": torch.arange(9 * 2**20, dtype=torch.int32).reshape(9, -1)}
    tensorkeep.save(state, place, compression=request.param, metadata={"run": 7})
    return place


def test_indexing(path: Path) -> None:
    with tensorkeep.open(path) as ckpt:
        for index in INDEXES:
            with case(index):
                assert same(ckpt["w"][index].clone(), WHOLE[index].clone())
        for index in (slice(None, None, -1), slice(5, 1, -2), -2, (slice(6, 2, -1), 3)):
            with case(f"numpy: {index}"):
                assert np.array_equal(ckpt["a"][index], WHOLE.numpy().astype(np.float64)[index])
        for index in (7, -8, (0, 300)):
            with case(f"out of range: {index}"), pytest.raises(IndexError):
                ckpt["w"][index]


def test_mapping(path: Path) -> None:
    with tensorkeep.open(path) as ckpt:
        assert list(ckpt) == ["w", "view", "a", "s", "e", "big"]
        assert (ckpt.metadata, ckpt.nbytes) == ({"run": 7}, 3 * WHOLE.nbytes + 4 + 9 * 2**22)
        assert (ckpt["w"].shape, ckpt["w"].dtype, ckpt["a"].dtype) == ((7, 300, 2), torch.float32, np.dtype("float64"))
        assert (ckpt["s"][()], ckpt["e"].load().shape) == (5, (0, 3))
        assert same(ckpt["view"][1].clone(), WHOLE[4])
        assert ckpt.verify().ok
        assert torch.equal(ckpt.load(select="s")["s"], torch.tensor(5.0))


def test_a_slice_reads_only_its_blocks_and_reading_stays_within_the_budget(path: Path) -> None:
    with tensorkeep.open(path) as ckpt:
        read = []
        real = ckpt._reader.read
        ckpt._reader.read = lambda name, start, stop, out: (read.append((start, stop)), real(name, start, stop, out))
        rows = ckpt["big"][8]
    assert torch.equal(rows, torch.arange(8 * 2**20, 9 * 2**20, dtype=torch.int32))
    assert read == [(32 * 2**20, 36 * 2**20)]
    with tensorkeep.open(path, memory_budget="64MiB") as ckpt:
        out = torch.zeros(2**20, 9, dtype=torch.int32).T
        ckpt["big"].load(out=out)
        assert 0 < ckpt._settings.pool.peak_bytes <= 64 * 2**20
        assert out[8, 5] == 8 * 2**20 + 5


def test_tensors_and_views_load_into_a_given_tensor(tmp_path: Path) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    tensorkeep.save({"w": w, "tied": w, "row": w[1], "t": w.T}, tmp_path / "c")
    with tensorkeep.open(tmp_path / "c") as ckpt:
        for name, expected in {"w": w, "tied": w, "row": w[1], "t": w.T}.items():
            for out in (torch.zeros(expected.shape), torch.zeros(*expected.shape, 2)[..., 0]):
                with case((name, out.stride())):
                    assert ckpt[name].load(out=out) is out
                    assert torch.equal(out, expected)
            assert torch.equal(ckpt[name].load(), expected)
            assert torch.equal(ckpt[name][1:], expected[1:])
        with pytest.raises(tensorkeep.UsageError, match="float32"):
            ckpt["w"].load(out=torch.zeros(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("format", ["native", "torch", "safetensors"])
def test_after_close(tmp_path: Path, format: str) -> None:
    tensorkeep.save({"w": torch.ones(3)}, tmp_path / "c", format=format)
    with tensorkeep.open(tmp_path / "c") as ckpt:
        lazy = ckpt["w"]
    ckpt.close()
    for read in (lazy.load, lambda: lazy[0], lambda: lazy.load(out=torch.zeros(3)), ckpt.load, ckpt.verify):
        with pytest.raises(tensorkeep.UsageError, match="is closed"):
            read()


def test_load_and_verify_use_the_files_that_were_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tensorkeep.save({"w": torch.zeros(10)}, "c")
    with tensorkeep.open("c") as ckpt:
        tensorkeep.save({"w": torch.ones(20)}, "c", overwrite=True)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert torch.equal(ckpt.load()["w"], torch.zeros(10))
        report = ckpt.verify()
        assert report.ok
        assert report.nbytes == 40
    with tensorkeep.open(tmp_path / "c", verify=False) as ckpt, pytest.raises(tensorkeep.UsageError, match="verify=F"):
        ckpt.verify()


def test_an_unknown_name_is_a_key_error_with_the_nearest(path: Path) -> None:
    with tensorkeep.open(path) as checkpoint:
        with pytest.raises(KeyError, match="has no tensor 'vieew'\ndid you mean 'view'") as caught:
            checkpoint["vieew"]
        assert isinstance(caught.value, tensorkeep.TensorNotFoundError)
        assert "nothing" not in checkpoint
        assert checkpoint.get("nothing") is None
        # So is one that is not a text.
        assert (0 in checkpoint, checkpoint.get(0, "none")) == (False, "none")  # type: ignore[call-overload]
        with pytest.raises(KeyError, match="has no tensor 0"):
            checkpoint[0]  # type: ignore[index]


def test_to_reads_onto_a_device_or_as_another_dtype(tmp_path: Path) -> None:
    tensorkeep.save({"t": torch.arange(6.0).reshape(2, 3), "a": np.arange(3)}, tmp_path / "c")
    with tensorkeep.open(tmp_path / "c") as checkpoint:
        assert same(checkpoint["t"].to("cpu", torch.bfloat16), torch.arange(6.0).reshape(2, 3).bfloat16())
        assert same(checkpoint["a"].to(torch.float32), torch.arange(3.0))
        assert checkpoint["t"].to("meta").device.type == "meta"
