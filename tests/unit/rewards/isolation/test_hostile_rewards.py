"""Rewards that misbehave on one completion, in any way: it gets None, in time, and the others their reward."""

import time
from collections.abc import Iterator

import pytest

from rewards.isolation.reward import Reward

pytestmark = pytest.mark.slow

FUNCTION = """
import asyncio, ctypes, decimal, gc, logging, os, signal, subprocess, sys, threading, time, warnings

class Bad(Exception):
    def __str__(self):
        raise RuntimeError("not even this")
    __repr__ = __str__

class BadNumber(float):
    def __float__(self):
        raise RuntimeError("no number")

class Endless:
    def tolist(self):
        while True:
            pass

def recurse(depth=0):
    return recurse(depth + 1)

def forever():
    while True:
        time.sleep(1)

def close_everything():
    for fd in range(3, 256):
        try:
            os.close(fd)
        except OSError:
            pass

def stop_collecting():
    gc.disable()
    gc.set_threshold(0)
    raise MemoryError

def misbehave(text, log_extra):
    ACTS = {
ACTS_OF_TEST
    }
    return ACTS[text]()

def reward(completions, log_extra, **columns):
    return [misbehave(text, log_extra) if text != "good" else 1.0 for text in completions]
"""
FAULTS = {  # what the function does: the kind of the error, where only one is right
    "exec('raise KeyError(1)')": "KeyError",
    "exec('raise KeyboardInterrupt')": "KeyboardInterrupt",
    "exec('raise GeneratorExit')": "GeneratorExit",
    "exec('raise StopIteration')": "StopIteration",
    "exec('raise asyncio.CancelledError')": "CancelledError",
    "exec('raise Bad')": "Bad",
    "sys.exit(0)": "SystemExit",
    "recurse()": "RecursionError",
    "stop_collecting()": "MemoryError",
    "os._exit(0)": "Died",
    "os.abort()": "Died",
    "ctypes.string_at(0)": "Died",
    "os.kill(os.getpid(), signal.SIGKILL)": "Died",
    "os.kill(os.getppid(), signal.SIGKILL) or forever()": "Died",
    "os.killpg(0, signal.SIGKILL)": "Died",
    "close_everything()": "",
    "os.kill(os.getpid(), signal.SIGSTOP)": "Timeout",
    "forever()": "Timeout",
    "Endless()": "",
    "exec('while True: pass')": "Timeout",
    "subprocess.run(['sleep', '60'])": "Timeout",
    "threading.Thread(target=forever).start() or 'text'": "NotANumber",
    "subprocess.Popen(['sleep', '60'], start_new_session=True) and 'text'": "NotANumber",
    "float('nan')": "NotFinite",
    "10**400": "NotFinite",
    "decimal.Decimal('0.5')": "NotANumber",
    "BadNumber(1)": "",
    "[1.0]": "NotANumber",
    "1j": "NotANumber",
    "b'1'": "NotANumber",
    "log_extra('x', 5)": "TypeError",
    "print('x' * 10**7) or 'text'": "NotANumber",
    "asyncio.run(asyncio.sleep(0)) or 'text'": "",
}


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reward]:
    folder = tmp_path_factory.mktemp("hostile")
    acts = "\n".join(f"        {act!r}: lambda: {act}," for act in FAULTS)
    (folder / "hostile.py").write_text(FUNCTION.replace("ACTS_OF_TEST", acts))
    with (folder / "output").open("w") as output:
        hostile = Reward(f"{folder / 'hostile.py'}:reward", "hostile", timeout=1, output=output)
        yield hostile
        hostile.close()


@pytest.mark.parametrize("act", FAULTS)
def test_a_hostile_reward_costs_the_completion_it_is_hostile_to(reward: Reward, act: str) -> None:
    before, started = reward.errors.copy(), time.monotonic()
    assert reward.score(completions=["good", act, "good"]) == [1, None, 1]
    assert reward.faulted == [1]
    assert sum((reward.errors - before).values()) == 1
    assert not FAULTS[act] or (reward.errors - before) == {FAULTS[act]: 1}
    assert time.monotonic() - started < 15
