// The XLA FFI handler that launches kernels from their binaries, without Python and without CUDA headers.
//
// A call's attributes contain everything about its launches, so an exported program needs only this handler:
//   kernels       int64: the number of kernels, which run one after the other on XLA's stream
// and for each kernel k:
//   cubin_k       string: the binary
//   name_k        string: the kernel's symbol in it
//   key_k         string of KEY_LENGTH characters: the SHA-256 of the symbol, the shared memory and the binary
//   launch_k      int64[LAUNCH_FIELDS]: see the enum of these
//   parameters_k  int64[2 n]: pairs of a kind (see the enum of these) and a value, one for each parameter of the kernel
// `jaxrnn._bridge.native.call` writes them. The version in the handler's name changes if their meaning does.
//
// Keys are checked when XLA instantiates a program. Kernels are loaded when XLA initializes it, once for each content and
// context, and stay loaded. Looking one up takes no lock, and devices load independently: a load may wait for its device,
// whose collective may wait for another device's launch.

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
enum { MAX_LOADED = 4096 };  // kernels on a device
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
// The least and the largest value of each field. Those of the grid are CUDA's, and keep its product below 2^63.
static const int64_t LIMITS[LAUNCH_FIELDS][2] = {
    [GRID_X] = {1, INT32_MAX}, [GRID_Y] = {1, 65535}, [GRID_Z] = {1, 65535}, [THREADS] = {1, 1024},
    [SHARED_MEMORY] = {0, INT32_MAX}, [CLUSTER] = {1, INT32_MAX}, [COOPERATIVE] = {0, 1}, [EARLY] = {0, 1},
    [CAPABILITY] = {0, INT32_MAX},
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
  CUDA_ERROR_INVALID_VALUE = 1,
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
  int (*cuFuncGetParamInfo)(CUfunction f, size_t index, size_t* offset, size_t* size);  // NULL before CUDA 12.4
  int version;
} cu;

typedef struct Kernel {
  char key[KEY_LENGTH];
  CUfunction function;
  struct Kernel* next;
  int64_t most_blocks;  // that run at once; only for cooperative launches
  int num_parameters;   // 0 if the driver does not say
  size_t sizes[MAX_PARAMETERS + 1];  // of the parameters, in bytes
} Kernel;

typedef struct Device {
  int ordinal, capability, multiprocessors, shared_memory;
  char name[96];
  CUcontext context;
  pthread_mutex_t loading;
  int num_loaded;                     // protected by `loading`
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
  *(void**)&cu.cuFuncGetParamInfo = dlsym(library, "cuFuncGetParamInfo");
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

static bool is_key(const XLA_FFI_ByteSpan* span) {
  if (span->len != KEY_LENGTH) return false;
  for (int i = 0; i < KEY_LENGTH; ++i)
    if ((span->ptr[i] < '0' || span->ptr[i] > '9') && (span->ptr[i] < 'a' || span->ptr[i] > 'f')) return false;
  return true;
}

static bool is_name(const XLA_FFI_ByteSpan* span) {
  return span->len && span->len < MAX_NAME && !memchr(span->ptr, '\0', span->len);
}

static bool decode(const XLA_FFI_Attrs* attrs, int k, Call* call) {
  const XLA_FFI_ByteSpan* key = attribute(attrs, "key", k, XLA_FFI_AttrType_STRING);
  const XLA_FFI_ByteSpan* cubin = attribute(attrs, "cubin", k, XLA_FFI_AttrType_STRING);
  const XLA_FFI_ByteSpan* name = attribute(attrs, "name", k, XLA_FFI_AttrType_STRING);
  const XLA_FFI_Array* launch = integers(attrs, "launch", k);
  const XLA_FFI_Array* parameters = integers(attrs, "parameters", k);
  if (!key || !is_key(key) || !cubin || !cubin->len || !name || !is_name(name) || !launch ||
      launch->size != LAUNCH_FIELDS || !parameters || parameters->size % 2 || parameters->size > 2 * MAX_PARAMETERS)
    return false;
  call->key = *key, call->cubin = *cubin;
  memcpy(call->name, name->ptr, name->len);
  call->name[name->len] = '\0';
  call->launch = launch->data, call->parameters = parameters->data;
  call->num_parameters = (int)(parameters->size / 2);
  for (int i = 0; i < LAUNCH_FIELDS; ++i)
    if (call->launch[i] < LIMITS[i][0] || call->launch[i] > LIMITS[i][1]) return false;
  return true;
}

// SHA-256 (FIPS 180-4).
typedef struct {
  uint32_t state[8];
  uint64_t length;  // of what was added, in bytes
  unsigned char block[64];
} Digest;

static uint32_t rotated(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void add_block(Digest* digest) {
  static const uint32_t K[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
  };
  uint32_t w[64], *s = digest->state;
  uint32_t a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
  for (int i = 0; i < 16; ++i) {
    const unsigned char* bytes = digest->block + 4 * i;
    w[i] = (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
  }
  for (int i = 16; i < 64; ++i)
    w[i] = w[i - 16] + (rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
           (rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10);
  for (int i = 0; i < 64; ++i) {
    uint32_t t = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + w[i];
    uint32_t u = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t, d = c, c = b, b = a, a = t + u;
  }
  s[0] += a, s[1] += b, s[2] += c, s[3] += d, s[4] += e, s[5] += f, s[6] += g, s[7] += h;
}

static void add_bytes(Digest* digest, const void* data, size_t size) {
  const unsigned char* bytes = data;
  while (size) {
    size_t used = digest->length % 64, added = size < 64 - used ? size : 64 - used;
    memcpy(digest->block + used, bytes, added);
    digest->length += added, bytes += added, size -= added;
    if (used + added == 64) add_block(digest);
  }
}

// Writes the key of a kernel, as `jaxrnn._bridge.native.call` computes it.
static void key_of(const Call* call, char key[KEY_LENGTH + 1]) {
  Digest digest = {.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab,
                             0x5be0cd19}};
  char start[MAX_NAME + 32];
  int size = snprintf(start, sizeof start, "%s%c%d%c", call->name, '\0', (int)call->launch[SHARED_MEMORY], '\0');
  add_bytes(&digest, start, (size_t)size);
  add_bytes(&digest, call->cubin.ptr, call->cubin.len);
  uint64_t bits = 8 * digest.length;
  add_bytes(&digest, "\x80", 1);
  while (digest.length % 64 != 56) add_bytes(&digest, "", 1);
  for (int i = 56; i >= 0; i -= 8) add_bytes(&digest, &(unsigned char){(unsigned char)(bits >> i)}, 1);
  for (int i = 0; i < 8; ++i) snprintf(key + 8 * i, 9, "%08x", (unsigned)digest.state[i]);
}

// Fails if a kernel is not the one that its key names.
static XLA_FFI_Error* check_key(const XLA_FFI_Api* api, const Call* call) {
  char key[KEY_LENGTH + 1];
  key_of(call, key);
  if (!memcmp(key, call->key.ptr, KEY_LENGTH)) return NULL;
  return error(api, XLA_FFI_Error_Code_DATA_LOSS,
               "jaxrnn: the kernel %s of a program is damaged, because its digest is not its key: compile, or export, the "
               "program again, and delete the cache that it came from, if it did", call->name);
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

// Asks the driver for the sizes of a kernel's parameters.
static void count_parameters(Kernel* kernel) {
  size_t offset;
  int n = 0, status = 0;
  if (!cu.cuFuncGetParamInfo) return;
  while (n <= MAX_PARAMETERS && !(status = cu.cuFuncGetParamInfo(kernel->function, (size_t)n, &offset, &kernel->sizes[n])))
    ++n;
  if (n > MAX_PARAMETERS || status == CUDA_ERROR_INVALID_VALUE) kernel->num_parameters = n;
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
    // Beyond this size, shared memory has to be requested. Kernels with clusters have static shared memory, too.
    if (bytes > 48 * 1024 || call->launch[CLUSTER] > 1) {
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
    count_parameters(kernel);
    return 0;
  } while (false);
#undef TRY
  cu.cuModuleUnload(module);
  return status;
}

static XLA_FFI_Error* find_kernel(const XLA_FFI_Api* api, Device* device, const Call* call, Kernel** kernel) {
  if ((*kernel = known_kernel(device, call))) return NULL;
  XLA_FFI_Error* failure = check_key(api, call);
  if (failure) return failure;
  if (call->launch[SHARED_MEMORY] > device->shared_memory)
    return error(api, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                 "jaxrnn: the kernel %s uses %lld bytes of shared memory, and %s has %d: compile, or export, the program "
                 "for this GPU", call->name, (long long)call->launch[SHARED_MEMORY], device->name,
                 device->shared_memory);
  pthread_mutex_lock(&device->loading);
  *kernel = known_kernel(device, call);  // another thread may have loaded it
  if (!*kernel && device->num_loaded == MAX_LOADED) {
    failure = error(api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                    "jaxrnn: %d kernels are loaded on %s, and they stay loaded, so that the kernel %s cannot be: run the "
                    "programs in several processes", MAX_LOADED, device->name, call->name);
  } else if (!*kernel) {
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
      ++device->num_loaded;
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
    bool exists = true, fits = true;
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
      case INT32: values[i].int32 = (int32_t)value, fits = value == values[i].int32; break;
      case INT64: values[i].int64 = value; break;
      case FLOAT32: values[i].bits = (uint32_t)value, fits = value == values[i].bits; break;
      default: exists = false;
    }
    if (!exists)
      return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                   "jaxrnn: parameter %d of the kernel %s is of the unknown kind %lld, or an array that the call does "
                   "not have: %lld", i, call->name, (long long)kind, (long long)value);
    if (i < kernel->num_parameters) fits &= kernel->sizes[i] == (kind == INT32 || kind == FLOAT32 ? 4u : 8u);
    if (!fits)
      return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                   "jaxrnn: parameter %d of the kernel %s does not fit: it is %lld, of the kind %lld", i, call->name,
                   (long long)value, (long long)kind);
  }
  if (kernel->num_parameters && kernel->num_parameters != call->num_parameters)
    return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                 "jaxrnn: the kernel %s has %d parameters, and a launch gives it %d", call->name, kernel->num_parameters,
                 call->num_parameters);
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
  if (frame->stage == XLA_FFI_ExecutionStage_PREPARE) return NULL;
  const XLA_FFI_Scalar* kernels = attribute(&frame->attrs, "kernels", -1, XLA_FFI_AttrType_SCALAR);
  int64_t num_calls = kernels && kernels->dtype == XLA_FFI_DataType_S64 ? *(const int64_t*)kernels->value : 0;
  if (num_calls < 1 || num_calls > MAX_KERNELS)
    return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                 "jaxrnn: the attribute \"kernels\" of a launch must be an int64 from 1 to %d", MAX_KERNELS);
  Call calls[MAX_KERNELS];
  XLA_FFI_Error* failure = NULL;
  for (int k = 0; k < (int)num_calls; ++k)
    if (!decode(&frame->attrs, k, &calls[k]))
      return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                   "jaxrnn: the attributes of kernel %d of a launch are missing or malformed: the program was not made "
                   "by this version of jaxrnn", k);
  if (frame->stage == XLA_FFI_ExecutionStage_INSTANTIATE) {
    for (int k = 0; k < (int)num_calls && !failure; ++k) failure = check_key(frame->api, &calls[k]);
    return failure;
  }
  Device* device;
  failure = find_device(frame, &device);
  return failure ? failure : run(frame, device, calls, (int)num_calls);
}
