"""The models that SGLang looks up first (``SGLANG_EXTERNAL_MODEL_PACKAGE``): those that can be trained here.

Without such a package SGLang imports all of its 250 models in every scheduler, which takes two CPU-seconds. It still
does
so for a model that is not found here.
"""
