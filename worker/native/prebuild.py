"""Build the kernels into this installation, for computers without a compiler.

    python -m worker.native.prebuild

All variants: the image that holds them does not know on which CPU it will run.
"""

import os
import sys

from worker.native.library import BuildError, find_compiler, installed_kernels
from worker.native.variants import VARIANTS


def main() -> int:
    """The exit status."""
    try:
        compiler, cache = find_compiler(os.environ), installed_kernels()
        for variant in VARIANTS:
            sys.stdout.write(f"{cache.build(variant, compiler)}\n")
    except (BuildError, OSError) as error:
        sys.stderr.write(f"prebuild: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
