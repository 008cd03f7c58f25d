"""What was measured and on which machine, in a few words: for titles."""

from collections import Counter
from typing import Any

import msgspec

from tensorkeep.bench.results import Results
from tensorkeep.structs import prepared
from tensorkeep.units import counted


class _Processor(msgspec.Struct, frozen=True):
    model: str = ""
    usable_cores: int = 0


class _Device(msgspec.Struct, frozen=True):
    name: str = ""


class _Machine(msgspec.Struct, frozen=True):
    processor: _Processor = _Processor()
    devices: tuple[_Device, ...] = ()


def subject_name(results: Results) -> str:
    """Return the model or the recipe; the name of the experiment if the results have no description of it."""
    return results.subject.description.partition(": ")[0] or results.experiment.name


def subject_and_machine(results: Results) -> str:
    """Return both, such as ``openllama-3b:bfloat16 on AMD EPYC, 2 cores``."""
    return " on ".join(filter(None, (subject_name(results), machine_name(results.environment))))


def machine_name(environment: dict[str, Any]) -> str:
    """Return the GPUs and the processor, such as ``AMD EPYC, 2 cores``; nothing if the environment lacks them."""
    try:
        found = msgspec.convert(environment, prepared(_Machine))
    except msgspec.ValidationError:
        # The schema of a results file allows any environment.
        return ""
    devices = Counter(device.name for device in found.devices if device.name)
    parts = [f"{count} x {name}" if count > 1 else name for name, count in devices.items()]
    if found.processor.model:
        parts.append(found.processor.model)
    if found.processor.usable_cores:
        parts.append(counted(found.processor.usable_cores, "core"))
    return ", ".join(parts)
