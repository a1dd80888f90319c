"""A training script without training: it speaks the protocol of workers, and misbehaves at will.

Not a test itself: the tests of the launcher run it as their script.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_bamboo.agent.environment import WorkerEnvironment
from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.membership.decision import Record, StepReport
from megatron_bamboo.membership.place import Place
from megatron_bamboo.membership.raised import Raised, tell_raised
from megatron_bamboo.membership.signs import SignPage
from megatron_bamboo.membership.store_client import StoreClient, StoreTimeout
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.rehearsal.fault import Fault

SLICE_SECONDS = 0.02


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument("--iters", type=int, default=4)
    parser.add_argument("--redundancy", default="lazy")
    parser.add_argument("--lease", type=float, default=5.0)
    parser.add_argument("--group-timeout", type=float, default=600.0)
    parser.add_argument("--pause", type=float, default=0.002)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE")
    parser.add_argument("--data", type=Path, metavar="FILE")
    parser.add_argument("--indices", type=Path, metavar="FOLDER")
    parser.add_argument("--interface")
    parser.add_argument("--prepare", choices=["well", "refuse", "raise", "silent", "sleep"])
    parser.add_argument("--misbehave", action="append", default=[], metavar="NODE:HOW")
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace) -> int:
    match options.prepare:
        case "refuse":
            sys.stderr.write("fake_training: --stages does not suit me\n")
            return 2
        case "raise":
            raise RuntimeError("cannot prepare")
        case "silent":
            return 0
        case "sleep":
            (Path(os.environ["BAMBOO_JOB_DIR"]) / "preparing").write_text(str(os.getpid()))
            time.sleep(60)
    shape = JobShape(
        equal_pipelines(options.stages, options.pipelines, 2),
        options.redundancy,
        options.iters,
        16,
        start_step=start_step(options),
        loaded_from=str(options.checkpoint) if start_step(options) else None,
        lease_seconds=options.lease,
        group_timeout_seconds=options.group_timeout,
        inputs=(("--data", str(options.data)),) if options.data else (),
        indices=str(options.indices) if options.indices else None,
        interface=options.interface,
    )
    make_indices(options)
    shape.write(Path(os.environ["BAMBOO_JOB_DIR"]))
    return 0


def make_indices(options: argparse.Namespace) -> None:
    if options.indices is not None:
        options.indices.mkdir(exist_ok=True)


def start_step(options: argparse.Namespace) -> int:
    """The step that the checkpoint holds; 0 where there is none."""
    file = options.checkpoint
    return int(file.read_text()) if file is not None and file.exists() else 0


class EpochEnded(Exception):
    pass


class LetGo(Exception):
    """This node is in no place any more."""


class Worker:
    def __init__(self, options: argparse.Namespace) -> None:
        self.environment = WorkerEnvironment.read()
        self.node = self.environment.node
        self.options = options
        self.ways = {
            w.partition(":")[2] for w in options.misbehave if w.startswith(self.node + ":")
        }
        deadline = self.environment.store_deadline_seconds
        self.store = StoreClient(self.environment.store, deadline, self.environment.credential)
        self.events = EventLog(Path(os.environ["BAMBOO_JOB_DIR"]) / "events", self.node)
        inject = os.environ["BAMBOO_INJECT"]
        self.fault = Fault.parse(inject) if inject else None
        self.signs = SignPage.open(self.environment.signs)
        self.step, self.entered, self.passed = 1, False, False
        self.must_end = False
        if "start-children" in self.ways:
            self.start_children()

    def start_children(self) -> None:
        """One forked and one of another program; neither asks to die with this process."""
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        self.child = subprocess.Popen(["sleep", "60"])

    def train(self) -> None:
        try:
            self.run_steps(self.join())
        except LetGo:
            self.store.wait([f"released/{self.node}"])

    def join(self) -> int:
        """Get a place, at once or as a standby; the first step in it."""
        self.store.wait(["plan/0"])
        self.load_plan(0)
        if self.node in self.plan.nodes:
            self.store.set(f"ready/{self.node}", b"1")
            return self.environment.start_step + 1
        self.store.wait([f"called/{self.node}"])
        self.store.set(f"ready/{self.node}", b"1")
        self.store.wait([f"joined/{self.node}"])
        self.load_plan(int(self.store.get(f"joined/{self.node}") or b""))
        assert self.plan.change is not None
        return self.plan.change.step

    def run_steps(self, step: int) -> None:
        while step <= self.options.iters and not self.must_end:
            try:
                self.compute(step)
                self.commit(step)
            except EpochEnded:
                self.change_epoch(step)
            # A decision may have applied the step in which the epoch ended.
            if self.passed and self.step == step:
                self.report(step)
                self.make_change(step)
                step += 1
        self.save(step - 1)
        if "die-at-end" in self.ways:
            self.store.wait([f"done/{node}" for node in self.plan.nodes if node != self.node])
            self.die(step=step - 1, action="0.0F0")
        self.store.set(f"done/{self.node}", b"1")
        if "linger" in self.ways:
            time.sleep(60)

    def save(self, step: int) -> None:
        """The last step, whichever that is; a number is all there is to it."""
        file = self.options.checkpoint
        if file is None:
            return
        beside = file.with_name(f"{file.name}.{self.node}")
        beside.write_text(str(step))
        beside.rename(file)
        saved = {"step": step, "epoch": self.epoch, "folder": str(file), "seconds": 0.0}
        value = json.dumps({**saved, "failure": None}).encode()
        self.store.compare_set(f"saved/{step}", None, value)

    def make_change(self, step: int) -> None:
        change = self.plan.change
        if change is not None and change.step <= step:
            self.plan = self.plan.made()
            if self.node not in self.plan.nodes:
                raise LetGo

    def load_plan(self, epoch: int) -> None:
        self.epoch = epoch
        value = self.store.get(f"plan/{epoch}")
        assert value is not None
        self.plan = Plan.from_json(value)

    def compute(self, step: int) -> None:
        pipeline = self.plan.pipelines[self.plan.pipeline_of(self.node)]
        stages = [s for s, node in enumerate(pipeline.stages) if node == self.node]
        for stage in stages:
            for action in ("0F0", "0F1", "0B0", "0B1"):
                self.act(step, f"{stage}.{action}")
        self.act(step, f"{pipeline.rank_of(self.node)}COMMIT")

    def act(self, step: int, action: str) -> None:
        if f"raise@{step}" in self.ways:
            raise RuntimeError(f"{self.node} has a bug in step {step}")
        if f"tell@{step}" in self.ways:
            self.tell(RuntimeError("a bug"), Place(step, action))
        if f"leave@{step}" in self.ways:
            raise SystemExit(0)
        if f"give-up@{step}" in self.ways:
            self.store.compare_set("failed", None, f"step {step}: the loss is nan".encode())
            raise SystemExit(1)
        if f"hang@{step}" in self.ways:
            time.sleep(60)
        if self.fault and (self.fault.step, str(self.fault.moment)) == (step, action):
            self.die(fault=str(self.fault), step=step, action=action)
        self.events.emit("action", action=action, step=step, epoch=self.epoch, pid=os.getpid())
        time.sleep(self.options.pause)
        self.look_for_ending()

    def tell(self, error: Exception, place: Place) -> None:
        tell_raised(self.environment.store, self.environment.credential, Raised.of(error, place))
        raise error

    def die(self, fault: str = "", **fields: object) -> None:
        self.events.emit("fault", fault=fault, **fields)
        os.killpg(0, signal.SIGKILL)

    def look_for_ending(self) -> None:
        if self.store.get(f"ending/{self.epoch}") is not None:
            raise EpochEnded

    def commit(self, step: int) -> None:
        self.step, self.entered, self.passed = step, True, False
        value = b"end" if self.signs.must_end else b"1"
        self.store.set(f"commit/{self.epoch}/{step}/{self.node}", value)
        keys = [f"commit/{self.epoch}/{step}/{node}" for node in self.plan.nodes]
        while True:
            try:
                self.store.wait(keys, SLICE_SECONDS)
                break
            except StoreTimeout:
                self.look_for_ending()
        self.must_end = b"end" in map(self.store.get, keys)
        self.passed = True

    def report(self, step: int) -> None:
        report = StepReport(
            step,
            self.epoch,
            (10 / step).hex(),
            1e-3,
            (1.5).hex(),
            16 * step,
            0.25,
            self.vector(step),
        )
        self.store.compare_set(f"passed/{step}", None, report.to_json().encode())

    def vector(self, step: int) -> tuple[str, ...]:
        return (float(step).hex(), float(self.must_end).hex())

    def change_epoch(self, step: int) -> None:
        if "silent" in self.ways:
            time.sleep(60)
        if "die-before-record" in self.ways:
            self.die(step=step, action="0.0F0")
        vector = self.vector(self.step) if self.passed else None
        entered = self.entered
        record = Record(self.node, self.step if entered else step, entered, self.passed, vector)
        value = record.to_json().encode()
        if self.store.compare_set(f"record/{self.epoch}/{self.node}", None, value) != value:
            sys.exit("fenced")
        if "die-after-record" in self.ways:
            self.die(step=step, action="0.0F0")
        current = self.store.wait_change("epoch", str(self.epoch).encode())
        assert current is not None
        self.load_plan(self.epoch + 1)
        if self.node not in self.plan.nodes:
            raise LetGo
        decision = self.plan.decision
        assert decision is not None
        if decision.applied and decision.step == self.step:
            assert decision.vector is not None
            self.must_end = float.fromhex(decision.vector[1]) > 0
            assert decision.vector == self.vector(self.step)
            self.passed = True
        elif self.entered and not self.passed:
            self.entered = False


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if os.environ["BAMBOO_PHASE"] == "prepare":
        return prepare(options)
    if os.environ["BAMBOO_PHASE"] == "index":
        make_indices(options)
        return 0
    Worker(options).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
