"""The glossary: its page, each term's place in a lesson, and the words that people search."""

import functools
import json
import re
from collections import defaultdict

from shared.book.build import lesson_folders
from shared.book.glossary import glossary_page, read_glossary
from shared.exercises.lessons import ROOT

TERMS = read_glossary(ROOT / "shared" / "book" / "glossary.toml")
FOLDERS = {folder.name[6:8]: folder for folder in lesson_folders(ROOT)}
# Words of five texts from which people learn distributed training, for which nothing was found.
SEARCHED = """
16 bytes|CUDA out of memory|DDP|FP8|FSDP1|GIL|GPUDirect|HBM|IO-aware|NVSwitch|PCIe|RDMA|RoCE|SPMD
SRAM|TF32|TCPStore|Tensor Cores|WebDataset|ZeRO-Infinity|ZeRO-Offload|activation checkpointing
arithmetic intensity|autoregressive|backend|byte-pair|deadlock|fragmentation|kernel fusion
model parallelism|process group|recomputation|rematerialization|rendezvous|smoke test|speed-up
strong scaling|throughput|tokenization|weak scaling
--config_file|--ipc=host|--master-addr|--node-rank|--num_gpus|--recompute-granularity
--tensor-model-parallel-size|ACCELERATE_USE_FSDP|BACKWARD_PRE|DeepSpeedCPUAdam|GROUP_RANK|HYBRID_SHARD
HfDeepSpeedConfig|LayerSpec|NNODES|NO_REENTRANT|NO_WRAP|PYTORCH_ALLOC_CONF|PipelineModule|PyTorchJob
SHARDED_STATE_DICT|SIZE_BASED_WRAP|TRANSFORMER_BASED_WRAP|TrainJob|accelerate config
accelerator.accumulate|aio|all_reduce_perf|auto_find_batch_size|auto_wrap_policy|broadcast_from_rank0|buffer_dtype
checkpoint_wrapper|cuda_time_total|deepspeed.initialize|default_config.yaml|destroy_process_group
device_ids|device_time_total|empty_cache|engine.backward|engine.step|expandable_segments
fused_bias_gelu|gather_output|ib_write_bw|init_process_group|input_is_parallel|key_averages
limit_all_gathers|max_memory_allocated|memlock|memory_allocated|memory_reserved|memory_summary|mp.spawn
nvidia-smi topo|nvme_path|nvprof|partition_method|prefetch_factor|record_shapes|set_device
set_float32_matmul_precision|sync_gradients|sync_module_states|tensorboard_trace_handler|use_orig_params
wait_time|with_flops|with_stack
"""


@functools.cache
def sections(lesson: str) -> dict[str, str]:
    """A lesson's headings, an exercise's without its difficulty, and what stands under each."""
    found, heading = defaultdict(str), ""
    notebook = json.loads((FOLDERS[lesson] / "lesson.ipynb").read_text("utf-8"))
    for cell in notebook["cells"]:
        for line in "".join(cell["source"]).splitlines():
            title = re.fullmatch(r"#{1,6} (.+)", line)
            if title and cell["cell_type"] == "markdown":
                heading = title[1].split(" · difficulty")[0]
            found[heading] += line + "\n"
    return found


def holds(text: str, word: str) -> bool:
    """Whether a text has a word, in any case, and not as a part of another."""
    return bool(re.search(rf"(?<![a-z0-9]){re.escape(word.lower())}(?![a-z0-9])", text.lower()))


def test_the_section_that_a_term_names_uses_or_explains_it():
    offenders = []
    for term in TERMS:
        called = [name for _, names in term.tools for name in names.split(", ")]
        text = sections(term.lesson).get(term.section, "")
        if not any(holds(text, word) for word in (term.name, *term.words, *term.also, *called)):
            offenders.append(f"{term.name}: {term.lesson}, {term.section}")
    assert not offenders, "\n".join(offenders)


def test_there_are_two_hundred_terms_and_the_page_shows_them():
    assert len(TERMS) >= 200
    page = (ROOT / "lessons" / "glossary.md").read_text("utf-8")
    names = [folder.name for folder in FOLDERS.values()]
    assert page == glossary_page(TERMS, names), "python -m shared.book.glossary writes it"


def test_the_book_s_search_leads_to_each_of_a_term_s_words():
    page = glossary_page(TERMS, [folder.name for folder in FOLDERS.values()], in_book=True)
    place = {}
    for line in page.splitlines():
        if word := line.removeprefix("```{index} ! single: ") if line.startswith("```{i") else "":
            place[word] = ""
        elif line.startswith("(term-"):
            place |= {word: line[1:-2] for word, term in place.items() if not term}
    assert place["HBM"] == "term-hbm"
    assert place["Shard(0)"] == "term-dtensor"  # another word for it
    assert place["--recompute-granularity"] == "term-gradient-checkpointing"  # a tool's


def test_what_people_search_is_found():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("lessons/*.md"), *ROOT.glob("lessons/*/lesson.ipynb")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    words = [word for line in SEARCHED.split("\n") for word in line.split("|") if word]
    assert [word for word in words if not holds(text, word)] == []
