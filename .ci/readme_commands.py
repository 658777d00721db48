"""Print the commands of README.md: the lines of its ```sh blocks, in order."""

import re
from pathlib import Path

readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
print("\n".join(re.findall(r"^```sh\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)))
