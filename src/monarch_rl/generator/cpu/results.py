"""Processes the results of a decoding step in SGLang's scheduler, on a machine without an accelerator.

For every token of every request SGLang checks features that few requests use: grammars, beams, stop strings, sessions,
Mamba state. Here a request without such features costs two appends per step while it runs; SGLang handles its end. With
the overlap scheduler SGLang handles all results, because they may belong to requests that have ended in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def process_decode(processor: Any, original: Callable[..., Any], batch: Any, result: Any) -> None:
    """Replaces ``SchedulerBatchResultProcessor.process_batch_result_decode``."""
    from sglang.srt.managers.scheduler_components.output_streamer import DEFAULT_FORCE_STREAM_INTERVAL as INTERVAL

    if not _plain_result(processor, batch, result):
        original(processor, batch, result)
        return
    tokens = result.next_token_ids.tolist()
    logprobs = result.logits_output.next_token_logprobs.tolist() if batch.return_logprob else None
    processor.metrics_reporter.num_generated_tokens += len(tokens)
    processor.token_to_kv_pool_allocator.free_group_begin()
    reported = []
    for i, (req, token) in enumerate(zip(batch.reqs, tokens, strict=True)):
        output_ids = req.output_ids
        output_ids.append(token)
        if logprobs is not None and req.return_logprob:
            req.logprob.output_token_logprobs_val.append(logprobs[i])
            req.logprob.output_token_logprobs_idx.append(token)
        if token in req._monarch_rl_ends or len(output_ids) >= req.sampling_params.max_new_tokens or req.to_finish:
            req.time_stats.set_last_decode_finish_time()
            req.update_finish_state()
            processor._handle_finish_state_updated_req(req, batch, result, i, result.logits_output)
        if req.finished_reason is not None or len(output_ids) % INTERVAL == 0:
            reported.append(req)
    if reported:
        processor.output_streamer.stream_output(reported, batch.return_logprob)
    processor.token_to_kv_pool_allocator.free_group_end()
    reporter = processor.metrics_reporter
    reporter.forward_ct_decode = (reporter.forward_ct_decode + 1) % (1 << 30)
    reporter.report_decode_stats(result.can_run_cuda_graph, running_batch=batch, num_generated_tokens=len(tokens))


def _plain_result(processor: Any, batch: Any, result: Any) -> bool:
    from sglang.srt.runtime_context import get_observability

    extras = (result.copy_done, result.auxiliary_host_output, result.routed_experts_output, result.indexer_topk_output)
    return (
        not (processor.enable_overlap or processor.enable_overlap_mlx or get_observability().enable_metrics)
        and batch.spec_algorithm.is_none()
        and all(extra is None for extra in extras)
        and result.logits_output.customized_info is None
        and all(map(_is_plain, batch.reqs))
    )


def _is_plain(req: Any) -> bool:
    """Whether a request needs only its tokens and their log-probs. Computed once per request."""
    plain: bool | None = req.__dict__.get("_monarch_rl_plain")
    if plain is None:
        sampling = req.sampling_params
        plain = req._monarch_rl_plain = not (
            req.beam_group is not None
            or req.grammar is not None
            or req.session is not None
            or req.multimodal_inputs is not None
            or req.tokenizer is not None
            or req.stream
            or req.return_sampling_mask
            or req.return_hidden_states
            or req.require_reasoning
            or req.logprob.top_logprobs_num
            or req.logprob.token_ids_logprob is not None
            or sampling.stop_strs
            or sampling.stop_regex_strs
        )
        req._monarch_rl_ends = _Ends(req)
    return plain


class _Ends:
    """The set of tokens that may end a request, and that SGLang must therefore check."""

    def __init__(self, req: Any) -> None:
        sampling = req.sampling_params
        stops = set() if sampling.ignore_eos else {*(sampling.stop_token_ids or ()), *(req.eos_token_ids or ())}
        self._stops = frozenset(stops)
        self._vocabulary = req.vocab_size if req.vocab_size is not None else 1 << 62

    def __contains__(self, token: int) -> bool:
        return token in self._stops or not 0 <= token < self._vocabulary
