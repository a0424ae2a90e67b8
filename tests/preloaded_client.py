"""What preloaded.py gives out as a Python: has the worker forked where one is at hand, and is the real Python for everything else.

    python -I -S preloaded_client.py FOLDER PYTHON -m rlmismatch.engines.worker CONFIG

It lives as long as the worker and ends as it does; killed, it takes the worker along.
"""

import json
import os
import signal
import socket
import sys

LARGEST = 1 << 17  # bytes of a request
LOST = 70  # exit code of a worker of which nothing more is known
# What differs from worker to worker, or from test to test, and is read by nothing that is imported.
PER_WORKER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST", "_", "PWD", "OLDPWD", "SHLVL"}


def comparable(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in PER_WORKER}


def can_be_forked(folder: str, arguments: list[str]) -> bool:
    if arguments[:2] != ["-m", "rlmismatch.engines.worker"]:
        return False
    with open(arguments[2]) as file:
        config = json.load(file)["config"]
    if config["impl"] == "triton" or config["device"] != "cpu" or "model.compile" in config["knobs"]:
        return False
    with open(os.path.join(folder, config["engine"] + ".json")) as file:
        return bool(json.load(file) == comparable(dict(os.environ)))


def ask(folder: str, arguments: list[str]) -> int:
    """The exit code of a worker that was forked for us; negative for a signal."""
    with open(arguments[2]) as file:
        worker = json.load(file)
    fds = [0, 1, 2, *([] if worker["fd"] is None else [worker["fd"]])]
    request = {"argv": arguments[1:], "cwd": os.getcwd(), "env": dict(os.environ), "fds": fds}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.path.join(folder, worker["config"]["engine"]))
        socket.send_fds(server, [json.dumps(request).encode()], fds)
        for fd in fds[3:]:
            os.close(fd)  # the driver sees the end of its channel when the worker ends
        return int(server.recv(16) or LOST)


def main() -> None:
    folder, python, *arguments = sys.argv[1:]
    if not can_be_forked(folder, arguments):
        os.execv(python, [python, *arguments])
    code = ask(folder, arguments)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
