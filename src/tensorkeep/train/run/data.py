"""The data of a run: opened where it is prepared, else prepared for the run; and found again when the run goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import NotACheckpointError, PathLike, TensorkeepError, UsageError
from tensorkeep.io.parallel import Progress
from tensorkeep.train.config.config import Config, flat
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.layout import FILE
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.data.sources import STDIN, STDLIB
from tensorkeep.train.run.folder import RunFolder

Meter = Callable[[str], AbstractContextManager[Progress | None]]
"""Shows a person how far something is; see `tensorkeep.cli.output.Output.meter`."""


def absolute_source(source: str) -> str:
    """Return a source as it is found from any folder: a run is gone on with from wherever."""
    return os.path.abspath(source) if source not in (STDIN, STDLIB) and os.path.exists(source) else source


def open_data(
    config: Config,
    folder: RunFolder,
    *,
    resume: bool = False,
    given: Collection[str] = (),
    meter: Meter = lambda doing: nullcontext(),
) -> Dataset:
    """Return the data of a run, every token checked.

    A new run has its data in ``data.source``, which is prepared in the run's folder if it is not prepared already. A
    run that goes on takes the data that it began with from wherever it is now: from ``data.source`` where that was
    given, else from the run's folder, from where it was, or from what it was prepared from.

    Parameters
    ----------
    config : Config
    folder : RunFolder
    resume : bool
        Whether the run there, if there is one, goes on.
    given : collection of str
        The settings that somebody asked for, by dotted name; others only say how data would be prepared.
    meter : callable
        Shows how far it is.

    Raises
    ------
    UsageError
        If the data is not what was asked for, or not that of the run.
    NotACheckpointError
        If there is none.
    CorruptCheckpointError, StoreError, DestinationExistsError, MissingExtraError, UnsupportedError
        See `prepare` and `Dataset.open`.
    """
    if resume and folder.exists():
        place = _found_again(config, folder, given, meter)
    elif _is_prepared(config.data.source):
        place = Path(config.data.source)
        dataset = Dataset.open(place)
        _check_given(config, given, _preparation(dataset, asked=config.data.vocab_size), dataset.path)
    else:
        place = _prepared(config, folder, meter, overwrite=True)
    with meter(f"checking {place}") as progress:
        return Dataset.open(place, verify=True, progress=progress)


def with_data(config: Config, folder: RunFolder, dataset: Dataset, *, resume: bool) -> Config:
    """Return a configuration that says of the data what is true, with a vocabulary that the data's fits into.

    Parameters
    ----------
    config : Config
    folder : RunFolder
    dataset : Dataset
    resume : bool
        Whether the run there goes on: with its data, whose fingerprint decides, however that is described now.
    """
    size = max(config.model.vocab_size, dataset.vocab_size)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, vocab_size=size))
    place = os.path.abspath(dataset.path)
    in_folder = place == str(folder.data)
    if resume:
        began = folder.config()
        source = began.data.source if in_folder else place
        return config.changed({**_preparation(began), "data.source": source})
    if in_folder and not _is_prepared(config.data.source):
        return config
    return config.changed({**_preparation(dataset), "data.source": place})


def _is_prepared(source: PathLike) -> bool:
    return source not in (STDIN, STDLIB) and os.path.exists(os.path.join(source, FILE))


def _preparation(described: Config | Dataset, *, asked: int | None = None) -> dict[str, Any]:
    """Return the settings by which data was prepared.

    Of a vocabulary the most to have is asked for, and a short text gives less: what was asked for may have been it.
    """
    if isinstance(described, Config):
        names = ("data.tokenizer", "data.vocab_size", "data.validation")
        return {name: flat(described.as_dict())[name] for name in names}
    tokenizer = described.about["tokenizer"]
    return {
        "data.tokenizer": tokenizer,
        "data.vocab_size": max(described.vocab_size, asked or 0) if tokenizer == "bpe" else None,
        "data.validation": described.about["validation"],
    }


def _check_given(config: Config, given: Collection[str], truth: dict[str, Any], path: Path) -> None:
    """Refuse a setting that would have no effect on data that is prepared already."""
    asked = flat(config.as_dict())
    for name, value in truth.items():
        if name in given and asked[name] != value:
            raise UsageError(
                f"{name} is {asked[name]!r}, and the data was prepared with {value!r}",
                path=path,
                remedy="leave the setting out, or start a new run on data that is prepared so",
            )


def _prepared(config: Config, folder: RunFolder, meter: Meter, *, overwrite: bool) -> Path:
    with meter(f"preparing {config.data.source}") as progress:
        return prepare(
            config.data.source,
            folder.data,
            tokenizer=config.data.tokenizer,
            vocab_size=config.data.vocab_size,
            validation=config.data.validation,
            overwrite=overwrite,
            progress=progress,
        ).path


def _found_again(config: Config, folder: RunFolder, given: Collection[str], meter: Meter) -> Path:
    """Return where the data of a run is that goes on."""
    began = folder.config()
    _check_given(config, given, _preparation(began), folder.path)
    source = config.data.source
    moved = "data.source" in given and source != absolute_source(began.data.source)
    if moved and _is_prepared(source):
        folder.check_data(Dataset.open(source))
        return Path(source)
    was = folder.path / str(folder.about()["data"].get("path"))
    found = _first_of_the_run(folder, [folder.data, was, Path(began.data.source)])
    if found is not None and moved:
        raise UsageError(
            f"the data of the run is in {found}, and {source!r} is no prepared data",
            path=folder.path,
            remedy="leave --data out, or give a folder that tensorkeep data prepare made of the same text",
        )
    if found is not None:
        return found
    if was != folder.data and not moved:
        raise NotACheckpointError(
            "the data of the run is not there any more", path=was, remedy="say where it is now: --data FOLDER"
        )
    return _prepared(config, folder, meter, overwrite=False)


def _first_of_the_run(folder: RunFolder, places: list[Path]) -> Path | None:
    """Return the first of some places that has the data of a run; None if there is no data in any of them."""
    refusal: TensorkeepError | None = None
    for place in filter(_is_prepared, places):
        try:
            folder.check_data(Dataset.open(place))
            return place
        except TensorkeepError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    return None
