"""The C extension, which pyproject.toml cannot describe: without a compiler, the installation is pure Python.

With the extension, the wheel is for this platform and every later Python (cp311-abi3); without it, for any platform.
"""

import os
import shlex
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.dist import Distribution
from setuptools.errors import CCompilerError, ExecError, PlatformError

FOLDER = Path("src/coder")
CODER = Extension(
    "tensorkeep.codecs._coder",
    sources=sorted(map(str, FOLDER.glob("*.c"))),
    depends=sorted(map(str, FOLDER.glob("*.h"))),
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    # Hidden: no function of another library may take the place of one of ours. setuptools puts CFLAGS before these,
    # where they would lose: a sanitizer's build needs its own -O1 -g.
    extra_compile_args=["-std=c11", "-O3", "-g0", "-fvisibility=hidden", *shlex.split(os.environ.get("CFLAGS", ""))],
)


class BuildCoder(build_ext):
    """Compile the extension, with a remedy where our own source does not compile."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except CCompilerError as error:
            remedy = "set TENSORKEEP_NO_EXTENSION=1 to install tensorkeep without it"
            raise CCompilerError(f"the coder does not compile: {error}\n{remedy}") from error


def obstacle() -> str | None:
    """Return why the extension is not built, found by compiling a file of one line; None if it is built."""
    if os.environ.get("TENSORKEEP_NO_EXTENSION") == "1":
        return "TENSORKEEP_NO_EXTENSION=1 is set"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "a free-threaded Python does not have the stable ABI"
    if sys.byteorder != "little":
        return "the compiled coder needs a little-endian processor"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\n")
        probe = Extension("probe", [str(source)], extra_compile_args=CODER.extra_compile_args)
        command = build_ext(Distribution({"ext_modules": [probe]}))
        command.build_lib = command.build_temp = folder
        command.ensure_finalized()
        try:
            command.run()
        except (CCompilerError, ExecError, PlatformError) as error:
            return f"a C11 compiler and Python's headers are needed ({error})"
    return None


reason = obstacle()
if reason:
    print(f"tensorkeep: the coder is not compiled, the one in Python is used: {reason}", file=sys.stderr)
    # An editable installation would still import the extension of an earlier build.
    Path("src/tensorkeep/codecs/_coder.abi3.so").unlink(missing_ok=True)
    setup()
else:
    setup(ext_modules=[CODER], cmdclass={"build_ext": BuildCoder}, options={"bdist_wheel": {"py_limited_api": "cp311"}})
