//! Serves BERT-class text models inside NVIDIA Triton.
