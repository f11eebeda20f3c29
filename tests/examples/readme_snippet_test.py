"""The README's C++ snippet is examples/quickstart.cpp, to the letter. usage: readme_snippet_test.py SOURCE_DIR"""
import pathlib
import sys

root = pathlib.Path(sys.argv[1])
snippet = (root / "README.md").read_text().partition("```cpp\n")[2].partition("```")[0]
if snippet != (root / "examples/quickstart.cpp").read_text():
    sys.exit("README.md: the C++ snippet differs from examples/quickstart.cpp: copy the file into it")
