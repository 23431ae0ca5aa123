"""A task's questions as prompts for an engine, and its verifier's word on the rollouts that come back."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from tasks import Task

from rollout import GenerationEngine, Rollout, RolloutError, SamplingParams


class Questions:
    """`size` questions of a task, the same for the same seed; each has a number, from 0."""

    def __init__(self, task: Task, tokenizer: Any, *, seed: int, size: int) -> None:
        self.task = task
        self._tokenizer = tokenizer
        self._seed = seed
        self._data = task.dataset(seed=seed, size=size)

    def __len__(self) -> int:
        return len(self._data)

    def answer(self, number: int) -> str:
        """The right one."""
        return str(self._data[number]["answer"])

    def prompt_ids(self, number: int) -> list[int]:
        """The instruction and the question, in the model's chat template where it has one."""
        question = self._data[number]["question"]
        if self._tokenizer.chat_template is None:
            return self._tokenizer.encode(f"{self.task.instruction}\n{question}\n")
        messages = [{"role": "system", "content": self.task.instruction}, {"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False)  # the template has its own

    def submit(
        self, engine: GenerationEngine, number: int, *, size: int, max_new_tokens: int, temperature: float = 1.0
    ) -> Sequence[Future[Rollout]]:
        """Queues `size` samples, prefilled once. Their noise depends on the seed and the number alone."""
        name = f"{self.task.name}-{number}"
        params = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=temperature, seed=(self._seed << 32) + number
        )
        return engine.submit_group(
            self.prompt_ids(number), params, size=size, request_id=name, group_id=name, prompt_id=name
        )

    def graded(self, number: int, futures: Sequence[Future[Rollout]]) -> list[Rollout]:
        """Waits for the rollouts of one question. The reward of each is the verifier's score of the answer that is found in
        its text. RolloutError for one that did not come to an end of its own."""
        return [self._graded(number, future.result()) for future in futures]

    def _graded(self, number: int, rollout: Rollout) -> Rollout:
        if not rollout.has_ended_well:
            raise RolloutError(f"rollout {rollout.rollout_id} ended with {rollout.finish_reason}: {rollout.error}")
        entry = self._data[number]
        answer = self.task.extract(rollout.text(self._tokenizer))
        metadata = {**rollout.metadata, "prompt": entry["question"], "solution": entry["answer"], "answer": answer}
        return replace(rollout, reward=float(self._data.score_answer(answer, entry)), metadata=metadata)
