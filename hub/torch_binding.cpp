// What makes an extension of Hugging Face kernels of the operators, which library.cpp and autograd.cpp register: the module
// that Python imports. registration.h is kernel-builder's.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
