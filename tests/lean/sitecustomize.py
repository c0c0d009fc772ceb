"""On the path of every program that a test starts.

Python looks again and again for garbage among all that is imported: a tenth of a process's start,
and tests start hundreds.
"""

import faulthandler
import gc
import signal

gc.set_threshold(100_000, *gc.get_threshold()[1:])
faulthandler.register(signal.SIGRTMAX, 2)  # tests.stacks asks for it
