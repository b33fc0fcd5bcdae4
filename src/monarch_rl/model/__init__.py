"""Hugging Face model folders, architectures, LoRA settings; chat templates, conversations and tool calls."""
