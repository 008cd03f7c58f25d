"""What `info`, `ls`, `open`, `diff` and `show` print of a training state."""

import enum
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from command_line import Call, RunJson

CONFIG = {"lr": 0.1, "name": "small", "betas": (0.9, 0.95), "empty": [], "long": "x" * 300}


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    """Two checkpoints of a run with Adam and random states."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "rng": tensorkeep.RandomState(), "step": step}
        tensorkeep.save({**state, "config": CONFIG}, tmp_path / str(step))
    return [tmp_path / "0", tmp_path / "1"]


def test_plain_values(steps: list[Path], call: Call, run_json: RunJson) -> None:
    found = tensorkeep.info(steps[1]).values
    assert found["step"] == 1
    assert found["config.betas"] == [0.9, 0.95]
    assert found["optimizer.param_groups.0.lr"] == 0.001
    assert found["optimizer.param_groups.0.params"] == [*range(6)]
    with tensorkeep.open(steps[1]) as checkpoint:
        assert checkpoint.plain_values == found
        with pytest.raises(KeyError, match=r"plain_values\['step'\]"):
            checkpoint["step"]
    lines = call("info", steps[1]).out.splitlines()
    start = lines.index("plain values:")
    # The outermost first, and not too much of them.
    assert lines[start + 2].split() == ["step", "1"]
    assert lines[start + 7].endswith("...")
    assert len(lines[start + 7]) < 150
    assert lines[start + 22].startswith("and ")
    assert "optimizer.param_groups.0.lr " in "".join(lines[: start + 22][start:])
    assert run_json("info", steps[1])["values"]["config.betas"] == [0.9, 0.95]
    assert [line.split()[0] for line in call("ls", steps[1], "config.n*").out.splitlines()[3:]] == ["config.name"]
    call("show", steps[1], "--out", steps[1].with_name("page.html"))
    assert "config.betas" in steps[1].with_name("page.html").read_text()


def test_values_that_json_lacks_are_texts(tmp_path: Path, run_json: RunJson) -> None:
    @tensorkeep.register
    class Mode(enum.Enum):
        FAST = 1

    state = {"nan": math.nan, "bytes": b"a", "mode": Mode.FAST, "dtype": torch.float16, "large": 2**60, "list": [b"a"]}
    tensorkeep.save({**state, "w": torch.zeros(1)}, tmp_path / "a")
    values: dict[str, Any] = run_json("ls", tmp_path / "a")["values"]
    assert values.pop("mode").endswith(".FAST")
    assert values == {
        "nan": "nan", "bytes": "b'a'", "dtype": "torch.float16", "large": str(2**60), "list": ["b'a'"]
    }  # fmt: skip


def test_counters_and_random_states_do_not_hide_the_weights(steps: list[Path], call: Call) -> None:
    report = tensorkeep.diff(*steps)
    assert not any(each.scalar or not each.floating for each in report.changed[:20])
    names = [each.name for each in report.folded()]
    assert [name for name in names if name.endswith("step")] == ["optimizer.*.step"]
    # One tensor of one kind is not folded.
    assert names[-2:] == ["rng.torch", "model.1.num_batches_tracked"]
    steps_of_adam = [each for each in report.changed if each.name.endswith(".step")]
    assert len(steps_of_adam) == 6
    # A counter goes from 1 to 2; it counts in no distance.
    assert report.total.largest < 1
    assert all(layer.largest < 1 for layer in report.by_layer() if layer.name.startswith("optimizer"))
    lines = call("diff", "--top", "30", *steps, code=1).out
    assert "optimizer.*.step" in lines
    assert ".0.weight.step" not in lines
    assert ".0.weight.step" in call("diff", "--top", "0", *steps, code=1).out
    shown = call("show", *steps, "--out", steps[0].with_name("page.html")).out
    assert ".step" not in shown


def test_show_in_python(steps: list[Path]) -> None:
    page = tensorkeep.show(steps[0])
    assert repr(page).splitlines()[0] == f"{steps[0]}: native"
    assert page._repr_html_().startswith('<iframe srcdoc="&lt;!')
    assert page.as_dict()["values"]["step"] == 0
    assert page.write(steps[0].with_name("page.html")) == len(page.html.encode())
    both = tensorkeep.show(*steps)
    assert "model: " in repr(both)
    with pytest.raises(tensorkeep.UsageError, match=r"\.html"):
        both.write(steps[0].with_name("page.txt"))
    with pytest.raises(tensorkeep.UsageError, match="for one checkpoint"):
        tensorkeep.show(*steps, format="native")
