import subprocess
import sys


def test_importing_the_package_is_light():
    code = (
        "import latte.data, sys; print([name for name in "
        "('datasets', 'transformers', 'tokenizers', 'pyarrow', 'pandas') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
