"""Kill fit and predict with SIGKILL again and again, and compare the results with those of runs that were not killed.

python tests/torture.py --kills 100

Half of the kills come at a random time, half inside a random phase: an update, the writing of a checkpoint, validation,
sampling, the writing of trajectories, the export. After each kill the same command is started again, until it ends by
itself. Then weights, trajectories, logged curves and files must be those of a run that was not killed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import RawArray
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from conftest import ROOT, make_policy, make_trajectories, write
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from topr import callbacks
from topr.callbacks import AtomicCheckpointIO, Evaluate, Monitor
from topr.evaluation import pipeline
from topr.sampling import LocalSampler
from topr.trajectories import read_trajectories

PHASES = {
    "update": (Monitor, "on_after_backward"),
    "checkpoint": (AtomicCheckpointIO, "save_checkpoint"),
    "validation": (Evaluate, "on_validation_batch_end"),
    "sampling": (LocalSampler, "sample"),
    "writing": (pipeline, "write_trajectories"),
    "export": (callbacks.evaluate, "export_policy"),
}
SAMPLES, EPOCHS, ROWS = 3, 2, 40


class Command:
    """A command of train.py in processes that can be killed, and the phases that they entered."""

    def __init__(self, folder: Path, *arguments: str):
        self.folder, self.arguments = folder, arguments
        self.entered = RawArray(
            "i", len(PHASES)
        )  # how often each phase was entered, in memory shared with the child
        folder.mkdir()

    def start(self) -> int:
        """The number of a new process."""
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.chdir(self.folder)
            os.setpgid(0, 0)
            with open("log.txt", "a") as log:
                os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            pipeline.PART = 2
            for number, (owner, name) in enumerate(PHASES.values()):
                self._observe(number, owner, name)
            sys.argv = ["train.py", *self.arguments]
            train.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)

    def _observe(self, number: int, owner, name: str) -> None:
        original = getattr(owner, name)

        def observed(*arguments, **more):
            self.entered[number] += 1
            if name == "on_after_backward":
                _, trainer, module = arguments
                batch = module.step_output.batch
                rows = batch.trajectory_B[batch.real_B > 0].tolist()
                used = json.dumps([os.getpid(), trainer.current_epoch, trainer.global_step, rows])
                with open("used.jsonl", "a") as file:
                    file.write(used + "\n")
            return original(*arguments, **more)

        setattr(owner, name, observed)

    def run(self, kill: tuple[str, float] | None = None) -> bool:
        """Run until the end, True, or until the kill, False: ("time", seconds) or (phase, entries and a part)."""
        self.entered[:] = [0] * len(PHASES)
        pid, began = self.start(), time.monotonic()
        due = None
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                assert status == 0, (self.folder / "log.txt").read_text()[-3000:]
                return True
            if kill is not None and due is None:
                kind, amount = kill
                if kind == "time":
                    due = began + amount
                elif self.entered[list(PHASES).index(kind)] > amount:
                    due = time.monotonic() + 0.05 * random.random()
            if due is not None and time.monotonic() >= due:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return False
            time.sleep(0.0005)


def used_rows(folder: Path) -> dict[int, list[int]]:
    """The rows that went into the final weights, by epoch: of each update, those of the last process that made it."""
    updates = {}
    for line in (folder / "used.jsonl").read_text().splitlines():
        pid, epoch, step, rows = json.loads(line)
        if updates.get(step, (pid,))[0] != pid:
            updates.pop(step)
        updates.setdefault(step, (pid, epoch, []))[2].extend(rows)
    epochs: dict[int, list[int]] = {}
    for _, epoch, rows in updates.values():
        epochs.setdefault(epoch, []).extend(rows)
    return epochs


def curves(version: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run, but for speed."""
    events = EventAccumulator(str(version), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("speed")]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def check_fit(folder: Path, whole: Path) -> None:
    """A fit that was killed and resumed has the results of one that was not."""
    assert [path.name for path in (folder / "runs" / "arithmetic").iterdir()] == ["version_0"]
    mine, theirs = (path / "runs" / "arithmetic" / "version_0" for path in (folder, whole))
    one, other = (load_file(path / "policy" / "model.safetensors") for path in (mine, theirs))
    assert all(torch.equal(one[name], other[name]) for name in other), "weights differ"
    for epoch, rows in used_rows(folder).items():
        assert sorted(rows) == list(range(ROWS)), f"epoch {epoch} did not use every trajectory once"
    summaries = [json.loads((path / "summary.json").read_text()) for path in (mine, theirs)]
    assert len({json.dumps(summary | {"tokens_per_s": 0}) for summary in summaries}) == 1, (
        "summaries differ"
    )
    assert curves(mine) == curves(theirs), "curves differ"
    files = [
        sorted(
            str(path.relative_to(version))
            for path in version.rglob("*")
            if "tfevents" not in path.name
        )
        for version in (mine, theirs)
    ]
    assert files[0] == files[1], set(files[0]) ^ set(files[1])


def check_predict(folder: Path, whole: Path) -> None:
    """A predict that was killed and started again has the results of one that was not."""
    parts = sorted(path.name for path in (whole / "sampled").glob("*.parquet"))
    assert sorted(path.name for path in (folder / "sampled").iterdir()) == [".lock", *parts]
    rows = [row for part in parts for row in read_trajectories(folder / "sampled" / part)]
    assert rows == [row for part in parts for row in read_trajectories(whole / "sampled" / part)]
    assert set(Counter(row.prompt_id for row in rows).values()) == {SAMPLES}


def torture(work: Path, kills: int, seed: int) -> Counter:
    """Kill `kills` times; returns the number of kills by command and moment.

    Raises:
        AssertionError: a result differs from that of a run that was not killed.
    """
    random.seed(seed)
    torch.set_num_threads(1)
    os.environ["HF_HOME"] = str(work / "hf")
    policy = make_policy(work / "base")
    data = write(work / "train.parquet", policy, make_trajectories(policy, ROWS))
    problems = work / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(10)))
    common = ["--config", str(ROOT / "configs" / "arithmetic.yaml"), f"--model.policy={policy}"]
    common += [f"--data.samples={SAMPLES}", "--trainer.enable_progress_bar=false"]
    fit = [
        "fit", *common, f"--data.train={data}", f"--data.val={problems}", f"--data.test={problems}",
        "--data.batch_size=4", "--data.microbatch_tokens=60", f"--trainer.max_epochs={EPOCHS}",
        "--trainer.val_check_interval=0.3", "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
        "--trainer.callbacks.init_args.every_n_train_steps=2", "--ckpt_path=last",
    ]  # fmt: skip
    predict = ["predict", *common, f"--data.problems={problems}", "--data.out=sampled"]
    counts: Counter = Counter()
    references = {}
    for name, arguments in (("fit", fit), ("predict", predict)):
        whole = Command(work / f"whole-{name}", *arguments)
        began = time.monotonic()
        whole.run()
        references[name] = (
            whole.folder,
            time.monotonic() - began,
            dict(zip(PHASES, whole.entered, strict=True)),
        )
    run = 0
    while counts.total() < kills:
        name, arguments = (("fit", fit), ("predict", predict))[run % 3 == 2]
        whole, seconds, entered = references[name]
        killed = Command(work / f"{name}-{run}", *arguments)
        while True:
            phases = [phase for phase in PHASES if entered[phase]]
            phase = random.choice(phases) if random.random() < 0.5 else "time"
            amount = (
                random.uniform(0, seconds) if phase == "time" else random.randrange(entered[phase])
            )
            if killed.run((phase, amount) if counts.total() < kills else None):
                break
            counts[f"{name}, {phase}"] += 1
        (check_fit if name == "fit" else check_predict)(killed.folder, whole)
        shutil.rmtree(killed.folder)
        run += 1
    counts["runs completed and compared"] = run
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="torture-"))
    counts = torture(work, args.kills, args.seed)
    shutil.rmtree(work)
    for moment, count in sorted(counts.items()):
        print(f"{moment:30} {count}")
    print("weights, trajectories, curves and files are those of runs that were not killed")


if __name__ == "__main__":
    main()
