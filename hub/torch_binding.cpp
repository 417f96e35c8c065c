// Creates the Python module of an extension for Hugging Face kernels. library.cpp and autograd.cpp register its operators.
// kernel-builder provides registration.h.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
