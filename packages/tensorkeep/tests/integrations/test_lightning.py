"""`TensorkeepIO` against the real Lightning: a run resumes, and its checkpoints are tested, opened and removed."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("transformers")]
lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402

from tensorkeep.integrations.lightning import TensorkeepIO  # noqa: E402


class Model(lightning.LightningModule):
    """A regression whose validation loss is given: the second epoch is the best."""

    def __init__(self, width: int = 4, losses: tuple[float, ...] = (0.5, 0.1, 0.3, 0.4)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", self.hparams.losses[self.current_epoch])

    def test_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("bias", self.layer.bias[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def loader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4) / 32, batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = loader


@pytest.fixture(autouse=True)
def warnings_of_lightning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(lightning|torch)\..*")
        yield


def trainer(out: Path, epochs: int, io: Any = None, **options: Any) -> Any:
    options = {"save_last": True, "save_top_k": 1, **options}
    checkpoints = ModelCheckpoint(out, "{epoch}", monitor="val_loss", **options)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    io = TensorkeepIO() if io is None else io
    callbacks = [checkpoints, EarlyStopping("val_loss", patience=9)]
    return lightning.Trainer(accelerator="cpu", max_epochs=epochs, plugins=[io], callbacks=callbacks, **quiet)


@pytest.mark.parametrize("options", [{}, {"compression": "lossless"}, {"format": "torch"}], ids=str)
def test_the_usual_steps_of_a_program(tmp_path: Path, options: dict[str, str]) -> None:
    lightning.seed_everything(1, verbose=False)
    model, run = Model(), trainer(tmp_path, 4, TensorkeepIO(**options))
    run.fit(model)
    final = model.layer.bias.item()
    best = run.checkpoint_callback.best_model_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=1.ckpt", "last.ckpt"]
    assert Path(best).name == "epoch=1.ckpt" and Path(best).is_dir() == ("format" not in options)
    [tested] = run.test(ckpt_path="best", verbose=False)
    opened = Model.load_from_checkpoint(best, losses=(1.0,))
    assert (opened.hparams.width, opened.hparams.losses) == (4, (1.0,))
    assert opened.layer.bias.item() == tested["bias"] != final
    last = Model.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu", strict=True)
    assert last.layer.bias.item() == tested["bias"]  # Lightning saves it with each checkpoint that it keeps
    assert torch.equal(last.layer.weight, tensorkeep.load(tmp_path / "last.ckpt")["state_dict"]["layer.weight"])
    assert tensorkeep.verify(best).ok


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_that_was_just_begun_is_loaded(tmp_path: Path, weights_only: bool) -> None:
    model, run = Model(), trainer(tmp_path, 1)
    run.fit(model)
    for name in ("a", "b"):
        model.layer.bias.data += 1
        run.save_checkpoint(tmp_path / name, weights_only=weights_only)
        opened = Model.load_from_checkpoint(tmp_path / name)
        assert torch.equal(opened.layer.bias, model.layer.bias)
    assert ("optimizer_states" in tensorkeep.load(tmp_path / "a")) != weights_only


def test_save_weights_only_keeps_only_weights(tmp_path: Path) -> None:
    run = trainer(tmp_path, 2, save_weights_only=True)
    run.fit(Model())
    assert "optimizer_states" not in tensorkeep.load(tmp_path / "last.ckpt")
    assert run.validate(Model(), ckpt_path="last", verbose=False)
    Model.load_from_checkpoint(run.checkpoint_callback.best_model_path)


@pytest.mark.parametrize("first", ["ours", "Lightning's"])
def test_a_run_resumes_exactly_also_from_a_checkpoint_of_lightning(tmp_path: Path, first: str) -> None:
    from lightning.fabric.plugins import TorchCheckpointIO

    def end(out: Path, *stages: tuple[int, Any]) -> dict[str, torch.Tensor]:
        lightning.seed_everything(1, verbose=False)
        for epochs, io in stages:
            model = Model(losses=(0.5, 0.1, 0.3, 0.4))
            trainer(out, epochs, io).fit(model, ckpt_path="last" if any(out.glob("*")) else None)
        return model.state_dict()

    io = TensorkeepIO() if first == "ours" else TorchCheckpointIO()
    whole = end(tmp_path / "whole", (4, None))
    resumed = end(tmp_path / "resumed", (2, io), (4, TensorkeepIO()))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert all(path.is_dir() for path in tmp_path.glob("*/last*"))


def test_the_error_of_a_save_is_raised(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1, TensorkeepIO(compression="no such codec"))
    with pytest.raises(tensorkeep.TensorkeepError, match="no such codec"):
        run.fit(Model())
    (tmp_path / "taken.ckpt").write_text("not a checkpoint")
    io = TensorkeepIO()
    with pytest.raises(tensorkeep.DestinationExistsError):
        io.save_checkpoint({"state_dict": {}}, tmp_path / "taken.ckpt")
        io.teardown()
    with pytest.raises(tensorkeep.UsageError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "other.ckpt", storage_options={})
    with pytest.raises(FileNotFoundError):
        Model.load_from_checkpoint(tmp_path / "missing.ckpt")


def test_a_file_of_lightning_remains_until_a_save_succeeds(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    torch.save({"epoch": 1}, last)
    with pytest.raises(tensorkeep.UnsupportedLeafError):
        TensorkeepIO().save_checkpoint({"state_dict": {"code": max}}, last)
    assert torch.load(last) == {"epoch": 1}
    TensorkeepIO().save_checkpoint({"epoch": 2}, last)
    assert tensorkeep.load(last) == {"epoch": 2} and [*tmp_path.iterdir()] == [last]


def test_a_link_is_replaced_and_not_its_target(tmp_path: Path) -> None:
    io = TensorkeepIO()
    io.save_checkpoint({"epoch": 1}, tmp_path / "epoch=1.ckpt")
    last = tmp_path / "last.ckpt"  # as with save_last="link"
    last.symlink_to("epoch=1.ckpt")
    io.save_checkpoint({"epoch": 2}, last)
    assert tensorkeep.load(last) == {"epoch": 2} and not last.is_symlink()
    assert tensorkeep.load(tmp_path / "epoch=1.ckpt") == {"epoch": 1}


def test_an_address_that_only_lightning_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorkeep.integrations import lightning as module

    def refuse(path: Path) -> bool:
        raise tensorkeep.StoreError("no credentials", path=path, remedy="give some")

    trainer(tmp_path, 1, TensorkeepIO(format="torch")).fit(Model())
    monkeypatch.setattr(module, "is_native", refuse)
    assert Model.load_from_checkpoint(tmp_path / "last.ckpt", map_location={"cuda:1": "cuda:0"})


def test_hyperparameters_that_are_code_are_left_out_with_a_warning(tmp_path: Path) -> None:
    given = {"width": 4, "loss": torch.nn.MSELoss(), "heads": [torch.nn.Linear(1, 1)], "activation": torch.nn.ReLU}
    with pytest.warns(UserWarning, match=r"left out: loss, heads, activation; .*ignore=\['loss'"):
        io = TensorkeepIO()
        io.save_checkpoint({"hyper_parameters": given, "epoch": 1}, tmp_path / "last.ckpt")
    io.teardown()
    assert tensorkeep.load(tmp_path / "last.ckpt") == {"hyper_parameters": {"width": 4}, "epoch": 1}
    assert len(given) == 4
