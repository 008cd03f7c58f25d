"""Groups of parameters: which settings each parameter is updated with."""

from pathlib import Path
from typing import Any

import pytest

from chatgot.config.config import Config, given_settings, read_words, setting_names
from chatgot.config.recipes import get_recipe
from chatgot.model.gpt import GPT
from chatgot.optim.optimizers import KINDS, build_optimizers, set_learning_rate
from chatgot.run.folder import RunFolder
from tensorkeep.errors import UsageError
from tiny_training import CONFIG, check_resumes_exactly

BASE = CONFIG.changed({"model.n_layers": 2, "model.bias": True, "model.tied": False, "optim.lr": 0.5})
GROUPS = {"optim.groups.embeddings.lr_factor": 0.1, "optim.groups.norms.weight_decay": 0.3}


def settings_of(config: Config, *, factor: float = 1.0) -> dict[str, tuple[float, float]]:
    """Return the learning rate and the weight decay of each parameter."""
    model = GPT(config.model)
    optimizers = build_optimizers(model, config.optim)
    set_learning_rate(optimizers, factor)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, tuple[float, float]] = {}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            found |= {names[id(each)]: (group["lr"], group["weight_decay"]) for each in group["params"]}
    assert found.keys() == set(names.values())
    return found


def test_a_group_changes_its_parameters_only_and_the_last_one_that_states_a_setting_decides() -> None:
    plain, changed = settings_of(BASE), settings_of(BASE.changed(GROUPS))
    different = {name: changed[name] for name in plain if changed[name] != plain[name]}
    assert different == {
        **dict.fromkeys(("tokens.weight", "positions.weight"), (pytest.approx(0.05), 0.1)),
        **{name: (0.5, 0.3) for name in plain if ".norm" in name or name.startswith("norm.")},
    }
    half = settings_of(BASE.changed(GROUPS), factor=0.5)
    assert half == {name: (rate / 2, decay) for name, (rate, decay) in changed.items()}
    matrices = {"optim.groups.matrices.lr_factor": 2.0, "optim.groups.matrices.weight_decay": 0.0}
    found = settings_of(BASE.changed({**matrices, "optim.groups.blocks.1.*.lr_factor": 4.0}))
    assert found["blocks.0.mlp.up.weight"] == (1.0, 0.0)
    assert found["blocks.1.mlp.up.weight"] == (2.0, 0.0)
    assert found["blocks.1.mlp.up.bias"] == (2.0, 0.0)
    assert found["tokens.weight"] == (0.5, 0.1)


def test_a_factor_applies_to_the_rate_of_muon_and_every_kind_has_parameters() -> None:
    config = BASE.changed({"optim.name": "muon", "optim.muon_lr": 0.02, "optim.groups.blocks.1.*.lr_factor": 0.5})
    found = settings_of(config)
    assert (found["blocks.0.mlp.up.weight"][0], found["blocks.1.mlp.up.weight"][0]) == (0.02, 0.01)
    assert (found["blocks.0.norm1.weight"][0], found["blocks.1.norm1.weight"][0]) == (0.5, 0.25)
    for kind in KINDS:
        assert settings_of(BASE.changed({f"optim.groups.{kind}.lr_factor": 0.5})) != settings_of(BASE), kind


RATE_REMEDY = "give optim.groups.GROUP.lr_factor or optim.groups.GROUP.weight_decay"


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        ({"optim.groups.heads.lr_factor": 2}, "has 'heads', and no trained parameter is in it", "embeddings, head"),
        ({"model.tied": True, "optim.groups.head.lr_factor": 2}, "has 'head', and no", "give 'embeddings'"),
        ({"optim.groups.head.rate": 1}, r"optim\.groups\.head\.rate is not a setting", RATE_REMEDY),
        ({"optim.groups.head.lr_factor": -1}, "lr_factor", ""),
    ],
)
def test_invalid_groups_are_refused(changes: dict[str, Any], message: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        settings_of(BASE.changed(changes))
    assert remedy in str(caught.value.remedy)


def test_groups_are_given_as_options_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text('[train.optim.groups."blocks.*.norm1.*"]\nweight_decay = 0.5\n')
    _, words = read_words(["--optim.groups.embeddings.lr_factor", "0.25"])
    config = get_recipe("shakespeare-char-cpu").changed(given_settings(words, file=tmp_path / "file.toml"))
    assert config.optim.groups["embeddings"].lr_factor == 0.25
    assert config.optim.groups["blocks.*.norm1.*"].weight_decay == 0.5
    assert Config.from_dict(config.as_dict()) == config
    assert "optim.groups" in setting_names()


# With Muon, AdamW updates all that is not a matrix.
@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.exhaustive), "muon"])
def test_resume_with_groups_is_exact(tmp_path: Path, data: Path, optimizer: str) -> None:
    config = BASE.changed({**GROUPS, "optim.name": optimizer, "optim.lr": 1e-3, "loop.steps": 6})
    check_resumes_exactly(config, tmp_path, data, "train", stop_at=3)
    assert RunFolder(tmp_path / "parts").record().config.optim == config.optim
