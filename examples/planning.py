from kvlink.planning import evaluate_pd_decision, plan_pd_split, summarize_request_mix

requests = [
    {"name": "summary", "prompt_tokens": 9000, "decode_tokens": 100},
    {"name": "story", "prompt_tokens": 50, "decode_tokens": 900},
    {"name": "chat", "prompt_tokens": 300, "decode_tokens": 80},
]
co_located, split = ({"throughput": 3.1, "p95_latency_ms": 1410}, {"throughput": 3.3, "p95_latency_ms": 1190})

print(summarize_request_mix(requests, long_prompt_threshold=2048))  # one of each kind: 1, 1, 1
print(plan_pd_split(requests, long_prompt_threshold=2048, long_decode_threshold=256))  # summary, story, chat
print(evaluate_pd_decision(co_located, split)["keep_split"])  # True: more throughput, and no worse a tail
