"""A loop that saves by accelerate's save_state, and resumes from the folder with the highest number."""

from __future__ import annotations

import re

import torch
from accelerate import Accelerator
from task import EVERY, STEPS, arguments, batch, finish, network


def main() -> None:
    given = arguments()
    accelerator = Accelerator(cpu=True)
    model = network()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if given.way == "ours":
        from datastates.adapters.accelerate import attach

        attach(accelerator)
    started = max(
        (int(m[1]) for p in given.out.iterdir() if (m := re.fullmatch("checkpoint-([0-9]+)", p.name))), default=0
    )
    if started:
        accelerator.load_state(str(given.out / f"checkpoint-{started}"))
    for step in range(started + 1, STEPS + 1):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(prepared(inputs), targets))
        optimizer.step()
        if step % EVERY == 0:
            accelerator.save_state(str(given.out / f"checkpoint-{step}"))
    accelerator.end_training()
    finish(given.out, model.state_dict(), started)


if __name__ == "__main__":
    main()
