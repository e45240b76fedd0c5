"""The notebook runs from top to bottom in a real kernel, and what it shows is worth showing."""

import json
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What the cells wrote, on few epochs."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "kernels" / "this").mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    about = {"argv": command, "display_name": "this Python", "language": "python"}
    (folder / "kernels" / "this" / "kernel.json").write_text(json.dumps(about))
    notebook = nbformat.read(EXAMPLES / "photos.ipynb", as_version=4)
    nbformat.validate(notebook)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source += f"\nRUN, EPOCHS = {str(folder / 'run')!r}, 2"
    client = nbclient.NotebookClient(notebook, timeout=None, kernel_name="this", resources={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        patch.delenv("MPLBACKEND", raising=False)  # the kernel has its own, which shows figures
        patch.setenv("MILLIONWAY_FEATURES", str(folder / "features"))
        client.execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.slow
def test_the_run_shows_its_card_and_the_search_its_images(outputs: list[dict]) -> None:
    pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert "<b>run " in pages[0] and "1,797" in pages[0]
    assert sum("<img" in page for page in pages) == 2
    assert any("image/png" in output.get("data", {}) for output in outputs)
    texts = [output["data"]["text/plain"] for output in outputs if "text/plain" in output.get("data", {})]
    assert any("'untrained'" in text for text in texts)


@pytest.mark.slow
def test_the_progress_does_not_flood(outputs: list[dict]) -> None:
    """A few lines for an epoch, no bar drawn again and again."""
    text = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "epoch 2/2" in text
    assert not re.search(r"[\r\x1b]|━", text) and len(text.splitlines()) < 40
