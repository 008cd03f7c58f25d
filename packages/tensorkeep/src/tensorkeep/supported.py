"""Where Tensorkeep runs: Linux, Python 3.11 or later, 64 bits, little-endian.

The syntax of this file is old on purpose: an old Python must raise the error below, and not a SyntaxError.
"""

import sys


def check_supported() -> None:
    """Raises ImportError with a remedy where Tensorkeep cannot work."""
    if sys.platform != "linux":
        found = sys.platform
        remedy = "it needs system calls of Linux: use a container, a virtual machine or, on Windows, WSL 2"
    elif sys.version_info < (3, 11):  # noqa: UP036 - a copy of the files, which pip did not check
        found = "Python {}.{}".format(*sys.version_info[:2])
        remedy = "install Python 3.11 or later"
    elif sys.maxsize < 2**32:
        found = "a 32-bit Python"
        remedy = "it maps files of any size: install a 64-bit Python"
    elif sys.byteorder != "little":
        found = "a big-endian processor"
        remedy = "it stores little-endian bytes: use x86-64 or AArch64"
    else:
        return
    supported = "supported: Linux on x86-64 and AArch64, Python 3.11 or later, 64 bits"
    raise ImportError(f"tensorkeep does not run on {found}; {supported}\n{remedy}")
