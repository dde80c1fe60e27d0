"""A child that sends each message back, or does what it says: exit, kill itself, sleep."""

import os
import sys
import time

from shardmill.child_process import begin_child, own_pipes, pack_message, read_message


def main() -> None:
    begin_child()
    requests, answers = (os.fdopen(pipe, mode) for pipe, mode in zip(own_pipes(), ("rb", "wb"), strict=True))
    print("printed by a library", flush=True)
    while (message := read_message(requests)) is not None:
        header, body = message
        if "exit" in header:
            sys.exit(header["exit"])
        if "kill" in header:
            os.kill(os.getpid(), header["kill"])
        time.sleep(header.get("sleep", 0))
        answers.writelines(pack_message(header, body))
        answers.flush()
