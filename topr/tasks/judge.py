"""The process that compares answers, from the side of the one that asks.

sympy can hang, or fill the memory, on a formula of ten characters, so the comparing runs where it can be killed: in one
plain child interpreter that speaks JSON lines. multiprocessing would either import the caller's main program again,
torch and all, or fork it with its threads and its CUDA context.
"""

import atexit
import json
import select
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

SECONDS = 4  # of one comparison
START_SECONDS = 60  # of a child's imports, which take about a second on an idle machine


class Judge:
    """One child process, started when first asked and anew after each time it had to be killed."""

    def __init__(self):
        self.lock = threading.Lock()  # the answers to two threads must not mix
        self.child: subprocess.Popen | None = None
        self.ready = False
        atexit.register(self.stop)

    def same(self, gold: str, answer: str) -> bool | None:
        """Whether two normal forms mean the same; None if the comparison ran out of time or memory, or failed.

        Raises:
            RuntimeError: the child does not start.
        """
        question = json.dumps([gold, answer, SECONDS + 1]).encode() + b"\n"
        with self.lock:
            for _ in range(2):  # once more if the child has died, perhaps of someone else's doing
                try:
                    if self.child is None:
                        self.start()
                    if not self.ready:
                        self.read(START_SECONDS)
                    self.ready = True
                    self.child.stdin.write(question)
                    return self.read(SECONDS)["same"]
                except (TimeoutError, EOFError, BrokenPipeError) as error:
                    ready = self.ready
                    self.stop()
                    self.start()  # at once: its imports pass while the caller does other things
                    if isinstance(error, TimeoutError):
                        break
            if not ready:
                raise RuntimeError("the process that compares answers does not start; is math-verify installed?")
            return None

    def start(self) -> None:
        # -P: this folder's math.py would hide the standard library's; a session of its own: Ctrl-C is the caller's
        self.child = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("equivalence.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        """Kill the child if there is one."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child.stdin.close()
            self.child.stdout.close()
        self.child, self.ready = None, False

    def read(self, seconds: float) -> dict:
        """The child's next line.

        Raises:
            TimeoutError: it does not come in time.
            EOFError: the child has died.
        """
        if not select.select([self.child.stdout], [], [], seconds)[0]:
            raise TimeoutError
        line = self.child.stdout.readline()  # a line is short and written at once
        if not line:
            raise EOFError
        return json.loads(line)


judge = Judge()


@lru_cache(maxsize=1 << 16)
def _decided(gold: str, answer: str) -> bool:
    verdict = judge.same(gold, answer)
    if verdict is None:
        raise TimeoutError  # not kept: the next time the machine may be less busy
    return verdict


def same(gold: str, answer: str) -> bool | None:
    """`Judge.same`, with its verdicts remembered."""
    try:
        return _decided(gold, answer)
    except TimeoutError:
        return None
