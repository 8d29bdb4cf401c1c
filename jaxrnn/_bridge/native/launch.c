// The XLA FFI handler that launches kernels from their binaries, without Python and without CUDA headers.
//
// A call's attributes contain everything about its launches, so an exported program needs only this handler:
//   kernels       int64: the number of kernels, which run one after the other on XLA's stream
// and for each kernel k:
//   cubin_k       string: the binary
//   name_k        string: the kernel's symbol in it
//   key_k         string of KEY_LENGTH characters: a hash of the binary, the symbol and the shared memory
//   launch_k      int64[LAUNCH_FIELDS]: see the enum of these
//   parameters_k  int64[2 n]: pairs of a kind (see the enum of these) and a value, one for each parameter of the kernel
// `jaxrnn._bridge.native.call` writes them. The version in the handler's name changes if their meaning does.
//
// Kernels are loaded when XLA initializes a program, once for each content and context. Looking one up takes no lock, and
// devices load independently: a load may wait for its device, whose collective may wait for another device's launch.

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#if XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR >= 4  // jaxlib 0.11 renamed it
typedef XLA_FFI_InternalExtension Extension;
#else
typedef XLA_FFI_Extension_Base Extension;
#endif

enum { KEY_LENGTH = 64, MAX_KERNELS = 16, MAX_PARAMETERS = 64, MAX_NAME = 256, BUCKETS = 256, ALIGNMENT = 16 };
enum {
  GRID_X, GRID_Y, GRID_Z,  // in blocks, so with clusters a multiple of their size
  THREADS,
  SHARED_MEMORY,  // dynamic, in bytes
  CLUSTER,        // blocks per cluster; 1 means no clusters
  COOPERATIVE,    // whether all blocks must run at once
  EARLY,          // whether the kernel may start before the previous one has ended (programmatic dependent launch)
  CAPABILITY,     // the compute capability that the binary is for, times ten
  LAUNCH_FIELDS
};
enum { BUFFER, NULL_POINTER, INT32, INT64, FLOAT32 };  // values: index among operands and results, -, number, number, bits

// The part of the driver's interface that is used; its binary interface is stable.
typedef struct CUctx_st* CUcontext;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct CUstream_st* CUstream;
typedef struct {
  int id, padding;
  union {
    int number;
    unsigned dimensions[3];
    char bytes[64];
  } value;
} CUlaunchAttribute;
typedef struct {
  unsigned grid[3], block[3], shared_memory;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned num_attributes;
} CUlaunchConfig;
enum {
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
  CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
  CU_FUNC_CACHE_PREFER_SHARED = 1,
  CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
  CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
  CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE = 5,
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
  CU_CLUSTER_SCHEDULING_POLICY_SPREAD = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};
#define DRIVER(X)                                                                                 \
  X(cuInit, (unsigned flags))                                                                     \
  X(cuDriverGetVersion, (int* version))                                                           \
  X(cuGetErrorString, (int status, const char** text))                                            \
  X(cuDeviceGet, (int* device, int ordinal))                                                      \
  X(cuDeviceGetName, (char* name, int length, int device))                                        \
  X(cuDeviceGetAttribute, (int* value, int attribute, int device))                                \
  X(cuDevicePrimaryCtxRetain, (CUcontext * context, int device))                                  \
  X(cuCtxGetCurrent, (CUcontext * context))                                                       \
  X(cuCtxPushCurrent_v2, (CUcontext context))                                                     \
  X(cuCtxPopCurrent_v2, (CUcontext * context))                                                    \
  X(cuThreadExchangeStreamCaptureMode, (int* mode))                                               \
  X(cuModuleLoadData, (CUmodule * module, const void* image))                                     \
  X(cuModuleUnload, (CUmodule module))                                                            \
  X(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name))              \
  X(cuFuncSetAttribute, (CUfunction function, int attribute, int value))                          \
  X(cuFuncSetCacheConfig, (CUfunction function, int preference))                                  \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int* blocks, CUfunction f, int threads, size_t bytes)) \
  X(cuLaunchKernelEx, (const CUlaunchConfig* config, CUfunction f, void** parameters, void** extra))
static struct {
#define FIELD(name, arguments) int(*name) arguments;
  DRIVER(FIELD)
#undef FIELD
  int version;
} cu;

typedef struct Kernel {
  char key[KEY_LENGTH];
  CUfunction function;
  struct Kernel* next;
  int64_t most_blocks;  // that run at once; only for cooperative launches
} Kernel;

typedef struct Device {
  int ordinal, capability, multiprocessors, shared_memory;
  char name[96];
  CUcontext context;
  pthread_mutex_t loading;
  _Atomic(Kernel*) kernels[BUCKETS];  // lists that only grow
  struct Device* next;
} Device;

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static bool is_open;             // protected by `opening`
static _Atomic(Device*) devices;  // a list that only grows

__attribute__((format(printf, 3, 4))) static XLA_FFI_Error* error(
    const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  XLA_FFI_Error_Create_Args args = {
      .struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = text, .errc = code};
  return api->XLA_FFI_Error_Create(&args);
}

static const char* text_of(int status) {
  const char* text = NULL;
  return cu.cuGetErrorString(status, &text) == 0 && text ? text : "unknown error";
}

// Opens the driver. A failure is not remembered, because its cause may pass.
static XLA_FFI_Error* open_driver(const XLA_FFI_Api* api) {
  if (is_open) return NULL;
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library)
    return error(api, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                 "jaxrnn: the program contains kernels for an NVIDIA GPU, but the NVIDIA driver cannot be opened (%s): "
                 "install it, or build the program with implementation=\"xla\"", dlerror());
#define FIND(symbol, arguments)                                                                            \
  if (!(*(void**)&cu.symbol = dlsym(library, #symbol)))                                                    \
    return error(api, XLA_FFI_Error_Code_FAILED_PRECONDITION,                                              \
                 "jaxrnn: the NVIDIA driver has no %s: install one for CUDA 12 or newer", #symbol);
  DRIVER(FIND)
#undef FIND
  int status = cu.cuInit(0);
  if (!status) status = cu.cuDriverGetVersion(&cu.version);
  if (status)
    return error(api, XLA_FFI_Error_Code_FAILED_PRECONDITION, "jaxrnn: the NVIDIA driver does not start: %s",
                 text_of(status));
  is_open = true;
  return NULL;
}

static Device* known_device(int ordinal) {
  Device* device = atomic_load_explicit(&devices, memory_order_acquire);
  while (device && device->ordinal != ordinal) device = device->next;
  return device;
}

static XLA_FFI_Error* describe(const XLA_FFI_Api* api, int ordinal, Device** found) {
  int handle, major = 0, minor = 0;
  Device* device = calloc(1, sizeof *device);
  if (!device) return error(api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "jaxrnn: out of memory");
  device->ordinal = ordinal;
  int status = cu.cuDeviceGet(&handle, ordinal);
  if (!status) status = cu.cuDeviceGetName(device->name, sizeof device->name, handle);
  if (!status) status = cu.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle);
  if (!status) status = cu.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle);
  if (!status)
    status = cu.cuDeviceGetAttribute(&device->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle);
  if (!status)
    status = cu.cuDeviceGetAttribute(&device->shared_memory, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                                     handle);
  if (!status) status = cu.cuDevicePrimaryCtxRetain(&device->context, handle);
  if (status) {
    free(device);
    return error(api, XLA_FFI_Error_Code_INTERNAL, "jaxrnn: CUDA device %d cannot be used: %s", ordinal,
                 text_of(status));
  }
  device->capability = 10 * major + minor;
  pthread_mutex_init(&device->loading, NULL);
  device->next = atomic_load_explicit(&devices, memory_order_relaxed);
  atomic_store_explicit(&devices, device, memory_order_release);
  *found = device;
  return NULL;
}

static XLA_FFI_Error* find_device(XLA_FFI_CallFrame* frame, Device** device) {
  XLA_FFI_DeviceOrdinal_Get_Args args = {
      .struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, .ctx = frame->ctx};
  XLA_FFI_Error* failure = frame->api->XLA_FFI_DeviceOrdinal_Get(&args);
  if (failure) return failure;
  if ((*device = known_device(args.device_ordinal))) return NULL;
  pthread_mutex_lock(&opening);
  if (!(*device = known_device(args.device_ordinal)) && !(failure = open_driver(frame->api)))
    failure = describe(frame->api, args.device_ordinal, device);
  pthread_mutex_unlock(&opening);
  return failure;
}

// One kernel of a call: its attributes.
typedef struct {
  XLA_FFI_ByteSpan key, cubin;
  char name[MAX_NAME];
  const int64_t* launch;
  const int64_t* parameters;
  int num_parameters;
} Call;

// Whether an attribute's name is `name`, or for k >= 0 `name` with "_k" after it. This runs in every launch that is not
// captured, and formatting the name would take longer than the rest of the search.
static bool is_named(const XLA_FFI_ByteSpan* span, const char* name, int k) {
  size_t i = strlen(name);
  if (span->len < i || memcmp(span->ptr, name, i)) return false;
  if (k < 0) return span->len == i;
  if (span->len < i + 2 || span->ptr[i] != '_') return false;
  int number = 0;
  while (++i < span->len && number <= k) {
    if (span->ptr[i] < '0' || span->ptr[i] > '9') return false;
    number = number * 10 + span->ptr[i] - '0';
  }
  return number == k && i == span->len;
}

static void* attribute(const XLA_FFI_Attrs* attrs, const char* name, int k, XLA_FFI_AttrType type) {
  for (int64_t i = 0; i < attrs->size; ++i)
    if (is_named(attrs->names[i], name, k)) return attrs->types[i] == type ? attrs->attrs[i] : NULL;
  return NULL;
}

static const XLA_FFI_Array* integers(const XLA_FFI_Attrs* attrs, const char* name, int k) {
  const XLA_FFI_Array* array = attribute(attrs, name, k, XLA_FFI_AttrType_ARRAY);
  return array && array->dtype == XLA_FFI_DataType_S64 ? array : NULL;
}

static bool decode(const XLA_FFI_Attrs* attrs, int k, Call* call) {
  const XLA_FFI_ByteSpan* key = attribute(attrs, "key", k, XLA_FFI_AttrType_STRING);
  const XLA_FFI_ByteSpan* cubin = attribute(attrs, "cubin", k, XLA_FFI_AttrType_STRING);
  const XLA_FFI_ByteSpan* name = attribute(attrs, "name", k, XLA_FFI_AttrType_STRING);
  const XLA_FFI_Array* launch = integers(attrs, "launch", k);
  const XLA_FFI_Array* parameters = integers(attrs, "parameters", k);
  if (!key || key->len != KEY_LENGTH || !cubin || !cubin->len || !name || name->len >= MAX_NAME || !launch ||
      launch->size != LAUNCH_FIELDS || !parameters || parameters->size % 2 || parameters->size > 2 * MAX_PARAMETERS)
    return false;
  call->key = *key, call->cubin = *cubin;
  memcpy(call->name, name->ptr, name->len);
  call->name[name->len] = '\0';
  call->launch = launch->data, call->parameters = parameters->data;
  call->num_parameters = (int)(parameters->size / 2);
  for (int i = GRID_X; i <= THREADS; ++i)
    if (call->launch[i] < 1 || call->launch[i] > INT32_MAX) return false;
  return call->launch[SHARED_MEMORY] >= 0 && call->launch[CLUSTER] >= 1;
}

static unsigned bucket(const char* key) {  // two hexadecimal digits
  unsigned hash = 0;
  for (int i = 0; i < 2; ++i) hash = hash * 16 + (unsigned)(key[i] <= '9' ? key[i] - '0' : key[i] - 'a' + 10);
  return hash % BUCKETS;
}

static Kernel* known_kernel(Device* device, const Call* call) {
  Kernel* kernel = atomic_load_explicit(&device->kernels[bucket(call->key.ptr)], memory_order_acquire);
  while (kernel && memcmp(kernel->key, call->key.ptr, KEY_LENGTH)) kernel = kernel->next;
  return kernel;
}

// Loads a kernel in the current context. On failure returns the status and names the function that failed.
static int load(const Device* device, const Call* call, Kernel* kernel, const char** failed) {
  CUmodule module;
  int blocks = 0, status;
  int bytes = (int)call->launch[SHARED_MEMORY];
#define TRY(function, ...) \
  if ((*failed = #function, status = cu.function(__VA_ARGS__))) break
  if ((*failed = "cuModuleLoadData", status = cu.cuModuleLoadData(&module, call->cubin.ptr))) return status;
  do {
    TRY(cuModuleGetFunction, &kernel->function, module, call->name);
    if (bytes > 48 * 1024) {  // beyond this size, shared memory has to be requested
      TRY(cuFuncSetCacheConfig, kernel->function, CU_FUNC_CACHE_PREFER_SHARED);
      TRY(cuFuncSetAttribute, kernel->function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes);
    }
    if (call->launch[CLUSTER] > 8)
      TRY(cuFuncSetAttribute, kernel->function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
    if (call->launch[COOPERATIVE]) {
      TRY(cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, kernel->function, (int)call->launch[THREADS],
          (size_t)bytes);
      kernel->most_blocks = (int64_t)blocks * device->multiprocessors;
    }
    return 0;
  } while (false);
#undef TRY
  cu.cuModuleUnload(module);
  return status;
}

static XLA_FFI_Error* find_kernel(const XLA_FFI_Api* api, Device* device, const Call* call, Kernel** kernel) {
  if ((*kernel = known_kernel(device, call))) return NULL;
  if (call->launch[SHARED_MEMORY] > device->shared_memory)
    return error(api, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                 "jaxrnn: the kernel %s uses %lld bytes of shared memory, and %s has %d: compile, or export, the program "
                 "for this GPU", call->name, (long long)call->launch[SHARED_MEMORY], device->name,
                 device->shared_memory);
  pthread_mutex_lock(&device->loading);
  XLA_FFI_Error* failure = NULL;
  if (!(*kernel = known_kernel(device, call))) {
    Kernel* loaded = calloc(1, sizeof *loaded);
    const char* failed = "calloc";
    CUcontext context;
    // in this mode, a capture that another thread has begun does not forbid a load
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED, status = loaded ? 0 : 2;  // CUDA_ERROR_OUT_OF_MEMORY
    if (loaded && !(failed = "cuCtxPushCurrent", status = cu.cuCtxPushCurrent_v2(device->context))) {
      bool exchanged = !cu.cuThreadExchangeStreamCaptureMode(&mode);
      status = load(device, call, loaded, &failed);
      if (exchanged) cu.cuThreadExchangeStreamCaptureMode(&mode);
      cu.cuCtxPopCurrent_v2(&context);
    }
    if (!status) {
      memcpy(loaded->key, call->key.ptr, KEY_LENGTH);
      _Atomic(Kernel*)* list = &device->kernels[bucket(loaded->key)];
      loaded->next = atomic_load_explicit(list, memory_order_relaxed);
      atomic_store_explicit(list, loaded, memory_order_release);
      *kernel = loaded;
    } else {
      free(loaded);
      int made_for = (int)call->launch[CAPABILITY], here = device->capability;
      bool unfit = status == CUDA_ERROR_NO_BINARY_FOR_GPU || status == CUDA_ERROR_INVALID_IMAGE;
      if (unfit && made_for == here)
        failure = error(api, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                        "jaxrnn: the NVIDIA driver cannot load the kernel %s (%s), though it was compiled for the compute "
                        "capability of %s, %d.%d: install a newer driver", call->name, text_of(status), device->name,
                        here / 10, here % 10);
      else if (unfit)
        failure = error(api, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                        "jaxrnn: the kernel %s was compiled for compute capability %d.%d and does not run on %s, which "
                        "has %d.%d (%s): compile, or export, the program for this GPU", call->name, made_for / 10,
                        made_for % 10, device->name, here / 10, here % 10, text_of(status));
      else
        failure = error(api, XLA_FFI_Error_Code_INTERNAL, "jaxrnn: %s failed for the kernel %s on %s: %s", failed,
                        call->name, device->name, text_of(status));
    }
  }
  pthread_mutex_unlock(&device->loading);
  return failure;
}

static void* address_of(const XLA_FFI_CallFrame* frame, int64_t i, bool* exists) {
  int64_t result = i - frame->args.size;
  *exists = i >= 0 && result < frame->rets.size;
  if (!*exists) return NULL;
  return ((const XLA_FFI_Buffer*)(result < 0 ? frame->args.args[i] : frame->rets.rets[result]))->data;
}

static XLA_FFI_Error* launch(const XLA_FFI_CallFrame* frame, const Device* device, const Call* call,
                             const Kernel* kernel, CUstream stream) {
  union {
    void* pointer;
    int32_t int32;
    int64_t int64;
    uint32_t bits;
  } values[MAX_PARAMETERS];
  void* parameters[MAX_PARAMETERS];
  for (int i = 0; i < call->num_parameters; ++i) {
    int64_t kind = call->parameters[2 * i], value = call->parameters[2 * i + 1];
    bool exists = true;
    parameters[i] = &values[i];
    switch (kind) {
      case BUFFER:
        values[i].pointer = address_of(frame, value, &exists);
        if ((uintptr_t)values[i].pointer % ALIGNMENT)
          return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                       "jaxrnn: array %lld of the kernel %s starts at %p, and kernels are compiled for arrays that are "
                       "aligned to %d bytes", (long long)value, call->name, values[i].pointer, ALIGNMENT);
        break;
      case NULL_POINTER: values[i].pointer = NULL; break;
      case INT32: values[i].int32 = (int32_t)value; break;
      case INT64: values[i].int64 = value; break;
      case FLOAT32: values[i].bits = (uint32_t)value; break;
      default: exists = false;
    }
    if (!exists)
      return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                   "jaxrnn: parameter %d of the kernel %s is of the unknown kind %lld, or an array that the call does "
                   "not have: %lld", i, call->name, (long long)kind, (long long)value);
  }
  const int64_t* given = call->launch;
  int64_t blocks = given[GRID_X] * given[GRID_Y] * given[GRID_Z];
  if (given[COOPERATIVE] && blocks > kernel->most_blocks)
    return error(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                 "jaxrnn: the %lld programs of the kernel %s wait for one another, and %s runs at most %lld at once: "
                 "compile, or export, the program for this GPU", (long long)blocks, call->name, device->name,
                 (long long)kernel->most_blocks);
  CUlaunchAttribute attributes[4] = {{0}};
  CUlaunchConfig config = {
      .grid = {(unsigned)given[GRID_X], (unsigned)given[GRID_Y], (unsigned)given[GRID_Z]},
      .block = {(unsigned)given[THREADS], 1, 1},
      .shared_memory = (unsigned)given[SHARED_MEMORY],
      .stream = stream,
      .attributes = attributes,
  };
  // Drivers before CUDA 12.3 cannot capture an early launch. Without the attribute, the kernel starts when the previous
  // one has ended, and gives the same result.
  if (given[EARLY] && cu.version >= 12030) {
    CUlaunchAttribute* early = &attributes[config.num_attributes++];
    early->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, early->value.number = 1;
  }
  if (given[COOPERATIVE]) {
    CUlaunchAttribute* cooperative = &attributes[config.num_attributes++];
    cooperative->id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, cooperative->value.number = 1;
  }
  if (given[CLUSTER] > 1) {
    CUlaunchAttribute* cluster = &attributes[config.num_attributes++];
    cluster->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster->value.dimensions[0] = (unsigned)given[CLUSTER];
    cluster->value.dimensions[1] = cluster->value.dimensions[2] = 1;
    CUlaunchAttribute* policy = &attributes[config.num_attributes++];
    policy->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
    policy->value.number = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
  }
  int status = cu.cuLaunchKernelEx(&config, kernel->function, parameters, NULL);
  if (!status) return NULL;
  return error(frame->api, XLA_FFI_Error_Code_INTERNAL, "jaxrnn: the launch of the kernel %s failed on %s: %s",
               call->name, device->name, text_of(status));
}

static XLA_FFI_Error* run(XLA_FFI_CallFrame* frame, Device* device, const Call* calls, int num_calls) {
  Kernel* kernels[MAX_KERNELS];
  XLA_FFI_Error* failure = NULL;
  // a CPU backend has no stage of initialization, so both stages load
  for (int k = 0; k < num_calls; ++k)
    if ((failure = find_kernel(frame->api, device, &calls[k], &kernels[k]))) return failure;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  XLA_FFI_Stream_Get_Args stream = {.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE, .ctx = frame->ctx};
  if ((failure = frame->api->XLA_FFI_Stream_Get(&stream))) return failure;
  CUcontext current = NULL;
  int status = cu.cuCtxGetCurrent(&current);
  bool pushed = !status && current != device->context;
  if (pushed) status = cu.cuCtxPushCurrent_v2(device->context);
  if (status)
    return error(frame->api, XLA_FFI_Error_Code_INTERNAL, "jaxrnn: the CUDA context of %s cannot be entered: %s",
                 device->name, text_of(status));
  for (int k = 0; k < num_calls && !failure; ++k)
    failure = launch(frame, device, &calls[k], kernels[k], stream.stream);
  if (pushed) cu.cuCtxPopCurrent_v2(&current);
  return failure;
}

__attribute__((visibility("default"))) XLA_FFI_Error* jaxrnn_launch_v1(XLA_FFI_CallFrame* frame) {
  Extension* extension = (Extension*)frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;  // XLA may capture it in a CUDA graph
    return NULL;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_INITIALIZE && frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const XLA_FFI_Scalar* kernels = attribute(&frame->attrs, "kernels", -1, XLA_FFI_AttrType_SCALAR);
  int64_t num_calls = kernels && kernels->dtype == XLA_FFI_DataType_S64 ? *(const int64_t*)kernels->value : 0;
  if (num_calls < 1 || num_calls > MAX_KERNELS)
    return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                 "jaxrnn: the attribute \"kernels\" of a launch must be an int64 from 1 to %d", MAX_KERNELS);
  Call calls[MAX_KERNELS];
  for (int k = 0; k < (int)num_calls; ++k)
    if (!decode(&frame->attrs, k, &calls[k]))
      return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                   "jaxrnn: the attributes of kernel %d of a launch are missing or malformed: the program was not made "
                   "by this version of jaxrnn", k);
  Device* device;
  XLA_FFI_Error* failure = find_device(frame, &device);
  return failure ? failure : run(frame, device, calls, (int)num_calls);
}
