# Its bindings use libllama alone; llama.cpp's common library, which it forces to ON, takes longer to build than the rest.
set(LLAMA_BUILD_COMMON OFF)
