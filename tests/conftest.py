"""What every test may count on."""

import signal


def pytest_configure() -> None:
    """Let Ctrl-C reach the programs that the tests start.

    A shell starts its background jobs with SIGINT ignored, and so would be all that such a job starts: a test that
    interrupts a program would then depend on how the tests were started.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
