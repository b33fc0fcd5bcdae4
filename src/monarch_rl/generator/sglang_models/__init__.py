"""The supported models, in the package that SGLang searches first (``SGLANG_EXTERNAL_MODEL_PACKAGE``).

Without such a package SGLang imports all of its 250 models in every scheduler, which takes two CPU-seconds. It still
does so for a model that is not found here.
"""
