"""vLLM for throughput.py, in a Python that has its CPU build and needs nothing of ours.

    python benchmarks/vllm_worker.py MODEL_FOLDER THREADS

Each line of stdin is {"prompts": [[...]], "new_tokens": n}; each answer is a line with the new tokens of each prompt.
"""

import json
import os
import sys


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    # vLLM and its children talk on stdout; the answers need a channel of their own
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=True,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(
            temperature=0.0, max_tokens=asked["new_tokens"], ignore_eos=True, detokenize=False, logprobs=0
        )
        outputs = llm.generate([{"prompt_token_ids": p} for p in asked["prompts"]], params, use_tqdm=False)
        print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), file=answers, flush=True)


if __name__ == "__main__":
    main()
