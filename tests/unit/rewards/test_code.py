import socket
import threading

import pytest

from rewards.code import code

TESTS = ["assert double(3) == 6", "assert double(-1) == -2"]
CORRECT = "def double(x):\n    return 2 * x"


def test_code_that_passes_its_tests_is_correct_fenced_or_not() -> None:
    fenced = f"First I tried:\n```python\nx = (\n```\nThen:\n```python\n{CORRECT}\n```\nDone."
    chat = [{"role": "assistant", "content": fenced}]
    assert code([CORRECT, fenced, chat, f"```\n{CORRECT}\n```"], [TESTS] * 4) == [1, 1, 1, 1]


def test_tests_may_be_one_text() -> None:
    assert code([CORRECT], ["\n".join(TESTS)]) == [1]


@pytest.mark.parametrize(
    "program",
    [
        "def double(x):\n    return 3 * x",
        "def double(x)\n    return 2 * x",
        "",
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        f"{CORRECT}\nprint('x' * 10_000_000)",
        f"{CORRECT}\nwhile True:\n    pass",
        f"{CORRECT}\nimport time\ntime.sleep(60)",
        f"{CORRECT}\nx = 'x' * 10**10",
        f"{CORRECT}\nimport os\nos.system('true')",
        f"{CORRECT}\nimport subprocess\nsubprocess.run(['true'])",
        f"{CORRECT}\nimport os\nos.fork()",
        f"{CORRECT}\nimport ctypes\nctypes.CDLL(None)",
        f"{CORRECT}\nopen('large', 'w').write('x' * 10**8)",
        f"{CORRECT}\nimport atexit\natexit.register(lambda: 1 / 0)\nimport sys\nsys.stdin.readline().index('x')",
    ],
)
def test_incorrect_code_and_forbidden_calls_earn_nothing(program: str) -> None:
    assert code([program], [TESTS], seconds=3, memory_mb=256) == [0]


def test_there_is_no_network_not_even_to_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reached = []
        thread = threading.Thread(target=lambda: reached.append(server.accept()), daemon=True)
        thread.start()
        program = f"{CORRECT}\nimport socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert code([program], [TESTS]) == [0]
        assert not reached


def test_the_environment_with_its_secrets_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert code([f"{CORRECT}\nimport os\nos.environ['HF_TOKEN']"], [TESTS]) == [0]


def test_programs_run_beside_each_other_and_keep_their_order() -> None:
    programs = [CORRECT, "", CORRECT, "x = 1", CORRECT]
    assert code(programs, [TESTS] * 5) == [1, 0, 1, 0, 1]
