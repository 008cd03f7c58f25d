"""A training loop that can be killed at any time and resumes: ``python examples/plain_loop.py``.

Run it, kill it, run it again: the weights at the end are those of a run that was never interrupted, bit for bit. On
SIGTERM, which batch systems send, it saves after the current step and ends.
"""

import argparse
import random
import time

import numpy
import torch

import tensorkeep


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to have time to kill it")
    options = parser.parse_args()

    # All that `RandomState` saves: runs in two processes are then equal in every entry.
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    # Everything that a step depends on, including the random-number generators.
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": tensorkeep.RandomState(), "step": 0}

    on_signal = tensorkeep.OnSignal()
    rules = tensorkeep.EverySteps(20) | on_signal
    # The manager is closed first and waits for its last save; a second SIGTERM meanwhile ends the process at once.
    with (
        on_signal,
        tensorkeep.CheckpointManager(options.out, save_when=rules, keep_last=2, incremental=True) as manager,
    ):
        first = 1
        if manager.latest() is not None:
            first = manager.restore(into=state)["step"] + 1
            print(f"resuming with step {first}", flush=True)
        for step in range(first, options.steps + 1):
            inputs = torch.randn(64, 32)
            loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            time.sleep(options.pause)
            # Read once: a signal that arrives after this line applies to the next step.
            stop = on_signal.received
            if manager.due(step) or stop or step == options.steps:
                manager.save(step, {**state, "step": step}, metrics={"loss": loss.item()})
            if stop:
                break
    if first > options.steps:
        print("all steps are done already")
    elif step < options.steps:
        print(f"stopped after step {step}")
    else:
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
