"""Decodes with llama.cpp: `python llama_decode.py MODEL.gguf THREADS`, told what by lines of JSON.

``{"prompt": [ids], "new_tokens": n}`` decodes greedily and answers ``{"milliseconds": [per token], "tokens": [ids]}``.
``{"prompt": [ids], "forced": [ids], "logits": PATH}`` decodes the given tokens and writes a logits row for each step,
that of the prompt's end first, as float32 to PATH. Runs in an interpreter that has llama_cpp and nothing of ours.
"""

import ctypes
import json
import sys
import time
from array import array
from collections.abc import Sequence

import llama_cpp


class Session:
    """A loaded model with one context."""

    def __init__(self, path: str, threads: int) -> None:
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = 1024
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def clear(self) -> None:
        """Forgets what was decoded."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def feed(self, tokens: Sequence[int]) -> None:
        """Decodes `tokens`."""
        buffer = (llama_cpp.llama_token * len(tokens))(*tokens)
        status = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(buffer, len(tokens)))
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def logits(self) -> "array[float]":
        """Of the last token."""
        pointer = llama_cpp.llama_get_logits_ith(self.context, -1)
        found = array("f")
        found.frombytes(ctypes.string_at(pointer, 4 * self.vocabulary))
        return found

    def greedy(self, prompt: Sequence[int], count: int, sampler: object) -> dict[str, list[float]]:
        """Milliseconds of each of `count` tokens, and the tokens."""
        self.clear()
        self.feed(prompt)
        token = llama_cpp.llama_sampler_sample(sampler, self.context, -1)
        times, tokens = [], []
        for _ in range(count):
            start = time.perf_counter()
            self.feed([token])
            token = llama_cpp.llama_sampler_sample(sampler, self.context, -1)
            times.append((time.perf_counter() - start) * 1e3)
            tokens.append(token)
        return {"milliseconds": times, "tokens": tokens}

    def forced(self, prompt: Sequence[int], tokens: Sequence[int], path: str) -> dict[str, int]:
        """Writes the logits after the prompt and after each of `tokens`."""
        self.clear()
        with open(path, "wb") as stream:
            for part in (prompt, *([token] for token in tokens)):
                self.feed(part)
                self.logits().tofile(stream)
        return {"rows": 1 + len(tokens)}


def main() -> None:
    """Answers requests until standard input closes."""
    session = Session(sys.argv[1], int(sys.argv[2]))
    sampler = llama_cpp.llama_sampler_init_greedy()
    for line in sys.stdin:
        request = json.loads(line)
        if "forced" in request:
            answer = session.forced(request["prompt"], request["forced"], request["logits"])
        else:
            answer = session.greedy(request["prompt"], request["new_tokens"], sampler)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
