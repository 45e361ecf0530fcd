"""The embedded task: left-to-right arithmetic, with its base policies, demonstrations and verifier.

Not here: anything that other tasks need.
"""

from topr.tasks.arithmetic.task import Arithmetic, ArithmeticVerifier
