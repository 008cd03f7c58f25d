"""The data of a run: opened if prepared, else prepared; a resumed run finds it again, and a branch takes it over."""

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from chatgot.config.config import TECHNIQUES, Config
from chatgot.data.batches import LARGEST_TOKENS, EvaluationWindows, check_window
from chatgot.data.dataset import TRAIN, Dataset, FileStatus
from chatgot.data.prepare import absolute_source, is_prepared, prepare
from chatgot.data.sft_batches import windows_of
from chatgot.run.folder import RunFolder
from chatgot.run.resume import BranchPoint
from chatgot.techniques.stack import Stack
from tensorkeep.errors import NotFoundError, PathLike, TensorkeepError, UsageError
from tensorkeep.ext.storage import Commit, Progress, store_errors

# Shows the progress of an activity to the user; see `tensorkeep.cli.output.Output.meter`.
ShowProgress = Callable[[str], AbstractContextManager[Progress | None]]

logger = logging.getLogger(__name__)

# The settings of the preparation of data.
_PREPARATION = ("data.tokenizer", "data.vocab_size", "data.validation")


def open_data(
    config: Config,
    folder: RunFolder,
    *,
    resume: bool = False,
    given: Collection[str] = (),
    meter: ShowProgress = lambda activity: nullcontext(),
) -> Dataset:
    """Return the data of a run, with every token verified: the data that a resumed run started with, or
    ``data.source``, prepared in the run's folder if it is text. ``given`` are the settings that the user gave.
    """
    if resume and folder.exists():
        return _open_again(config, folder, given, meter)
    if is_prepared(config.data.source):

        def check(dataset: Dataset) -> None:
            if "data.field" in given:
                logger.warning("data.field has no effect: %s is prepared data", dataset.path)
            _check_given(config, given, _preparation(dataset, asked=config.data.vocab_size), dataset.path)

        return _verified(config.data.source, meter, check)
    return _verified(_prepared(config, folder, meter, overwrite=True), meter)


def with_data(
    config: Config, folder: RunFolder, dataset: Dataset, *, resume: bool, origin: Config | None = None
) -> Config:
    """Describe the data in a configuration; ``origin`` is the configuration of the run that a new run branches from."""
    model = config.model.with_tokens(dataset.vocab_size)
    place = Path(os.path.abspath(dataset.path))
    in_folder = place == folder.data
    before = folder.record().config if resume else origin
    if before is not None:
        # Earlier versions let rows without a token take part in the loss.
        model = msgspec.structs.replace(model, vocab_padding=before.model.vocab_padding)
    config = msgspec.structs.replace(config, model=model)
    if resume:
        # A resumed run describes its data as at its start.
        started = folder.record().config
        source = started.data.source if in_folder else str(place)
        return config.changed({**{name: started.setting(name) for name in _PREPARATION}, "data.source": source})
    # The text was prepared in the folder of the run. `data.source` names the text, and the run finds the data in its
    # folder, so that both can move together.
    if in_folder and not is_prepared(config.data.source):
        return config
    return config.changed({**_preparation(dataset), "data.source": str(place)})


def _verified(
    place: PathLike,
    meter: ShowProgress,
    check: Callable[[Dataset], None] | None = None,
    known: Mapping[str, FileStatus] | None = None,
) -> Dataset:
    with meter(f"checking {os.fspath(place)}") as progress:
        return Dataset.open(place, verify=True, known=known, progress=progress, check=check)


def _verified_again(place: PathLike, folder: RunFolder, meter: ShowProgress) -> Dataset:
    # Files that have not changed since the run read them are not read again.
    return _verified(place, meter, folder.check_data, folder.record().data.verified)


def _preparation(dataset: Dataset, *, asked: int | None = None) -> dict[str, Any]:
    tokenizer = dataset.description["tokenizer"]
    # The vocabulary size of ``"bpe"`` is an upper bound, so the user may have asked for more.
    size = max(dataset.vocab_size, asked or 0) if tokenizer == "bpe" else None
    return dict(zip(_PREPARATION, (tokenizer, size, dataset.description["validation"]), strict=True))


def _check_given(config: Config, given: Collection[str], actual: dict[str, Any], path: Path) -> None:
    for name, value in actual.items():
        if name in given and config.setting(name) != value:
            raise UsageError(
                f"{name} is {config.setting(name)!r}, and the data was prepared with {value!r}",
                path=path,
                remedy="leave the setting out, or start a new run on data that is prepared with it",
            )


def check_preparation(config: Config, given: Collection[str], before: Config, path: Path) -> None:
    """Raise UsageError if a given setting contradicts how the data of a run was prepared."""
    _check_given(config, given, {name: before.setting(name) for name in _PREPARATION}, path)


def _prepared(config: Config, folder: RunFolder, meter: ShowProgress, *, overwrite: bool) -> Path:
    with meter(f"preparing {config.data.source}") as progress:
        return prepare(
            config.data.source,
            folder.data,
            tokenizer=config.data.tokenizer,
            vocab_size=config.data.vocab_size,
            validation=config.data.validation,
            field=config.data.field,
            overwrite=overwrite,
            progress=progress,
        ).path


def _open_again(config: Config, folder: RunFolder, given: Collection[str], meter: ShowProgress) -> Dataset:
    started = folder.record().config
    check_preparation(config, given, started, folder.path)
    source = config.data.source
    moved = "data.source" in given and source != absolute_source(started.data.source)
    if moved and is_prepared(source):
        return _verified_again(source, folder, meter)
    place = folder.path / folder.record().data.path
    found = _open_first([folder.data, place, Path(started.data.source)], folder, meter)
    if found is not None and moved:
        raise UsageError(
            f"the data of the run is in {found.path}, and {source!r} is not prepared data",
            path=folder.path,
            remedy="leave --data out, or give a folder that tensorkeep data prepare made of the same text",
        )
    if found is not None:
        return found
    # The run did not prepare data from elsewhere, so it cannot prepare that again.
    if place != folder.data and not moved:
        raise NotFoundError(
            "the data of the run is no longer there", path=place, remedy="give its new location: --data FOLDER"
        )
    return _verified(_prepared(config, folder, meter, overwrite=False), meter, folder.check_data)


def _open_first(places: list[Path], folder: RunFolder, meter: ShowProgress) -> Dataset | None:
    """Open the first place that holds the data of the run, undamaged; None if no place holds data."""
    # The first refusal is the most useful one: it is about the place that the record names.
    refusal: TensorkeepError | None = None
    for place in filter(is_prepared, places):
        try:
            return _verified_again(place, folder, meter)
        except TensorkeepError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    return None


def check_data(config: Config, dataset: Dataset, techniques: Stack) -> None:
    """Raise UsageError if a run cannot train on its data: it is too short, or a technique or masks do not allow it."""
    # Windows of text have one length; rows of conversations are filled up.
    is_text = dataset.chat_tokenizer is None
    splits = {"training split": dataset.train, "validation split": dataset.validation} if is_text else {}
    for split, tokens in splits.items():
        check_window(len(tokens), config.model.context_length, what=f"the {split}", path=dataset.path)
    for each in techniques.techniques:
        if each.refuses_conversations is not None and not is_text:
            remedy = f"turn it off: --{TECHNIQUES}{each.name} off"
            raise UsageError(f"{each.name} {each.refuses_conversations}", path=dataset.path, remedy=remedy)
    if not config.data.mask_documents:
        return
    if dataset.description["splits"][TRAIN]["documents"] is None:
        raise UsageError(
            "data.mask_documents is true, and the text is one stream without documents",
            path=dataset.path,
            remedy="prepare a folder of files, .jsonl or a table, or leave data.mask_documents out",
        )
    # Both mix features of neighbouring positions, also across the end of a document.
    if config.model.token_shift or config.model.convolution > 1:
        mixing = "token_shift" if config.model.token_shift else "convolution"
        raise UsageError(
            f"data.mask_documents is true, and model.{mixing} passes features from a document to the next one",
            remedy="leave one of them out",
        )


# Elements of the logits of a batch of ``eval.batches``.
_LARGEST_LOGITS = 2**26


def validation_windows(config: Config, dataset: Dataset) -> EvaluationWindows:
    """Return the windows of the validation split that a run is evaluated on; they do not depend on its ranks."""
    model, most = config.model, config.eval.tokens
    if config.eval.batches is not None:
        rows = max(1, min(LARGEST_TOKENS, _LARGEST_LOGITS // model.vocab_size) // model.context_length)
        most = config.eval.batches * rows * model.context_length
    return windows_of(dataset, model.context_length, most=most)


def open_branch_data(
    config: Config, folder: RunFolder, point: BranchPoint, given: Collection[str], meter: ShowProgress
) -> Dataset:
    """Return the data of a branch: ``data.source`` if that was given, else the data of the run branched from."""
    if "data.source" in given:
        dataset = open_data(config, folder, given=given, meter=meter)
        point.check_data(dataset)
        return dataset
    check_preparation(config, given, point.config, point.folder.path)
    dataset = open_data(point.config, point.folder, resume=True, meter=meter)
    # Data in the folder of that run is copied, so that the branch does not need the folder later.
    inside = Path(os.path.abspath(dataset.path)).is_relative_to(point.folder.path)
    return Dataset.open(_copied(dataset.path, folder.data)) if inside else dataset


def _copied(source: Path, destination: Path) -> Path:
    with Commit(destination, directory=True, overwrite=True, replaceable=is_prepared) as commit:
        with store_errors(destination, "copy the data"):
            for file in source.iterdir():
                with file.open("rb") as reading, (commit.path / file.name).open("xb") as writing:
                    shutil.copyfileobj(reading, writing, 1 << 20)
                    writing.flush()
                    # Durable before the folder is published: it must not appear with files that a crash empties.
                    os.fsync(writing.fileno())
        commit.publish()
    return destination
