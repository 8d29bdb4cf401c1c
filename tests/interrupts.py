"""Interrupts functions as Ctrl-C does, and counts the interrupts that Python dropped.

The tests of `make stress` use it in processes of their own.
"""

import os
import signal
import sys
import threading
import time


class Interrupts:
    """Counts interrupts of the main thread.

    Python reports and drops an exception that is raised in a callback of its garbage collector, such as JAX's, or in a
    finalizer. An interrupt that arrives there has no effect, and the user has to press Ctrl-C again.

    Attributes:
      stopped: the number of functions that an interrupt stopped, or after which one arrived.
      dropped: how many of these needed a second interrupt.
    """

    def __init__(self):
        self.stopped = self.dropped = 0
        self._reported = []
        sys.unraisablehook = self._report
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores SIGINT

    def _report(self, raised):
        self._reported.append(raised.exc_type)
        sys.__unraisablehook__(raised)

    def send(self, run, seconds):
        """Runs a function and interrupts it after some seconds; if nothing was raised, it interrupts a second time."""
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            run()
            timer.join()
            time.sleep(3)
            self.dropped += 1
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            self.stopped += 1

    def say(self):
        """Prints the counts. Fails if an interrupt disappeared that Python did not report as dropped."""
        assert self._reported.count(KeyboardInterrupt) == self.dropped, (self._reported, self.dropped)
        print("stopped", self.stopped, "times,", self.dropped, "at the second interrupt")
