"""The gate must fail when it should: a comparison that cannot fail proves nothing."""

import numpy as np
import pytest
import torch
from tensorkeep.bench.checkpoint.subject import Subject
from tensorkeep.bench.checkpoint.tools.known import USUAL
from tensorkeep.bench.checkpoint.tools.torch_tool import TorchTool
from tensorkeep.bench.demo.damage import flip_bit
from tensorkeep.bench.tune.rounds import NotRun, visitor

from tensorkeep.bench.checkpoint.gate import GateError, check_same
from tensorkeep.bench.checkpoint.measure import INTO_WARM, SAVE, STORED, WARM
from tensorkeep.bench.checkpoint.probes import files_of
from tensorkeep.checkpoint.inspect.verify import verify
from tensorkeep.checkpoint.save.save import save
from tensorkeep.errors import UsageError


def state():
    tied = torch.randn(64, 32)
    return {
        "model": {"wte": tied, "head": tied, "bias": torch.tensor([float("nan"), 0.0]), "t": torch.randn(9, 7).t()},
        "moments": [torch.zeros(3, dtype=torch.bfloat16), torch.ones(5, dtype=torch.int64)],
        "step": 7,
    }


@pytest.mark.parametrize("name", USUAL)
def test_every_arm_passes_the_gate_on_a_nested_state(name, tmp_path):
    subject = Subject(state())
    figures = visitor(USUAL[name], name, subject, tmp_path)()
    assert {SAVE, WARM, INTO_WARM, STORED} <= figures.keys()
    assert all(figures[measure] > 0 for measure in (SAVE, WARM, INTO_WARM, STORED))
    assert figures[STORED] > subject.nbytes / 2
    assert list(tmp_path.iterdir()) == []
    check_same(subject.target, subject.state, name)


def changed(change):
    one = state()
    change(one)
    return one


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["model"]["wte"].view(torch.int32)[3, 5].bitwise_xor_(1),
        lambda s: s["moments"][0].view(torch.int16).fill_(-(2**15)),  # -0.0 equals 0.0
        lambda s: s["model"].update(bias=torch.zeros(2)),
        lambda s: s["moments"].pop(),
        lambda s: s.update(step=8),
        lambda s: s["moments"].__setitem__(1, torch.ones(5, dtype=torch.int32)),
        lambda s: s["moments"].__setitem__(1, torch.ones(5, 1, dtype=torch.int64)),
    ],
)
def test_the_gate_sees_every_change(change):
    torch.manual_seed(0)
    saved = state()
    torch.manual_seed(0)
    check_same(state(), saved, "same")
    torch.manual_seed(0)
    with pytest.raises(GateError, match=r"torch gave back (other bits|another structure)"):
        check_same(changed(change), saved, "torch")


class Forgetful(TorchTool, frozen=True):
    """Fills nothing."""

    def load_into(self, path, state):
        pass


class Stale(TorchTool, frozen=True):
    """Gives back zeros."""

    def load(self, path):
        return {"w": torch.zeros(8)}


@pytest.mark.parametrize("arm", [Forgetful(), Stale()])
def test_an_arm_that_does_not_load_has_no_timing(arm, tmp_path):
    subject = Subject({"w": torch.ones(8)})
    # What an earlier arm left in the target must not pass for what this one did.
    subject.target["w"].copy_(subject.state["w"])
    with pytest.raises(GateError):
        visitor(arm, "torch", subject, tmp_path)()
    assert list(tmp_path.iterdir()) == []


class Helpless(TorchTool, frozen=True):
    def save(self, state, path):
        path.write_bytes(b"half")
        raise TypeError("no such thing\nand more")


def test_a_peer_that_cannot_is_not_run_and_leaves_nothing(tmp_path):
    with pytest.raises(NotRun, match=r"^torch cannot hold this state: no such thing$"):
        visitor(Helpless(), "torch", Subject(state()), tmp_path)()
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_filled_is_loaded_anew_only(tmp_path):
    subject = Subject({"w": torch.ones(8), "scalar": np.float32(2)})
    assert not subject.fillable
    figures = visitor(USUAL["tensorkeep"], "tensorkeep", subject, tmp_path)()
    assert WARM in figures
    assert INTO_WARM not in figures


def test_a_state_without_tensors_is_refused():
    with pytest.raises(UsageError, match="holds no tensor"):
        Subject({"step": 1})


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_a_flipped_bit_is_one_bit_and_is_found(compression, tmp_path):
    path = tmp_path / "ckpt"
    save({"small": torch.ones(10), "large": torch.randn(5_000_000)}, path, compression=compression)
    before = {file: file.read_bytes() for file in files_of(path)}
    flip = flip_bit(path)
    differing = [(file, content) for file, content in before.items() if file.read_bytes() != content]
    assert [file.name for file, _ in differing] == [flip.file]
    assert flip.before ^ flip.after == 1
    [problem] = verify(path).problems
    assert (problem.file, problem.name, problem.block) == (flip.file, flip.name, flip.block)
    assert flip.name == "large"
