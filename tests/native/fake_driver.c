// A libcuda.so.1 that records the calls it gets, one a line, in the file $FAKE_CUDA_LOG if it is set.
//
// $FAKE_CUDA_FAIL is "function=status" or "function=status*times". $FAKE_CUDA_DEVICE is "capability,SMs,shared memory,
// driver version,blocks per SM". A module is "FAKE ..." or anything else; $FAKE_CUDA_PARAMETERS has the parameters of its
// kernels as "kernel:8848;kernel:84", their sizes in bytes. The kernel "add" has parameters x, y, n, value, null, and
// computes y[i] = x[i] + value in float32 on the host.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int id, padding; union { int number; unsigned dimensions[3]; char bytes[64]; } value; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; void* stream; Attribute* attributes; unsigned count; } Config;
typedef struct Module { struct Module* next; int loaded; } Module;
typedef struct Function { struct Function* next; char name[256]; } Function;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int failures;
static Module* modules;  // that were loaded, and functions: kept, as a sanitizer takes what is lost for a leak
static Function* functions;
static __thread uintptr_t current;
static __thread int capture_mode;

static int record(const char* function, const char* format, ...) {
  pthread_mutex_lock(&lock);
  if (getenv("FAKE_CUDA_LOG")) {
    FILE* log = fopen(getenv("FAKE_CUDA_LOG"), "a");
    va_list arguments;
    va_start(arguments, format);
    fprintf(log, "%s ", function);
    vfprintf(log, format, arguments);
    va_end(arguments);
    fputc('\n', log);
    fclose(log);
  }
  const char* fail = getenv("FAKE_CUDA_FAIL");
  size_t length = strlen(function);
  int status = 0;
  if (fail && !strncmp(fail, function, length) && fail[length] == '=') {
    const char* times = strchr(fail, '*');
    if (!times || failures++ < atoi(times + 1)) status = atoi(fail + length + 1);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

static void fail(const char* reason, const char* what) {
  fprintf(stderr, "the fake driver: %s %s\n", reason, what);
  abort();
}

// Returns the sizes of a kernel's parameters, or NULL if there is no such kernel.
static const char* sizes_of(const char* name) {
  size_t length = strlen(name);
  for (const char* at = getenv("FAKE_CUDA_PARAMETERS"); at; at = strchr(at, ';') ? strchr(at, ';') + 1 : NULL)
    if (!strncmp(at, name, length) && at[length] == ':') return at + length + 1;
  return NULL;
}

static int fact(int index) {
  int facts[5] = {80, 108, 166912, 12040, 2};
  const char* given = getenv("FAKE_CUDA_DEVICE");
  if (given) sscanf(given, "%d,%d,%d,%d,%d", &facts[0], &facts[1], &facts[2], &facts[3], &facts[4]);
  return facts[index];
}

int cuInit(unsigned flags) { return record("cuInit", "%u", flags); }
int cuDriverGetVersion(int* version) { *version = fact(3); return record("cuDriverGetVersion", ""); }
int cuGetErrorString(int status, const char** text) {
  static __thread char found[64];
  snprintf(found, sizeof found, "fake error %d", status);
  *text = found;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) { *device = 100 + ordinal; return record("cuDeviceGet", "%d", ordinal); }
int cuDeviceGetName(char* name, int length, int device) {
  snprintf(name, (size_t)length, "Fake GPU %d", device - 100);
  return record("cuDeviceGetName", "%d", device);
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  if (attribute == 75) *value = fact(0) / 10;
  else if (attribute == 76) *value = fact(0) % 10;
  else if (attribute == 16) *value = fact(1);
  else if (attribute == 97) *value = fact(2);
  else return 1;
  return record("cuDeviceGetAttribute", "%d", attribute);
}
int cuDevicePrimaryCtxRetain(uintptr_t* context, int device) {
  *context = 0xc000 + (uintptr_t)device - 100;
  return record("cuDevicePrimaryCtxRetain", "%d", device);
}
int cuCtxGetCurrent(uintptr_t* context) { *context = current; return 0; }
int cuCtxPushCurrent_v2(uintptr_t context) {
  int status = record("cuCtxPushCurrent", "%lx", (unsigned long)context);
  if (current) fail("a context is current already", "");  // one deep is all that the handler needs
  if (!status) current = context;
  return status;
}
int cuCtxPopCurrent_v2(uintptr_t* context) {
  *context = current;
  current = 0;
  return record("cuCtxPopCurrent", "");
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return record("cuThreadExchangeStreamCaptureMode", "%d", capture_mode);
}
int cuModuleLoadData(Module** module, const char* image) {
  int status = record("cuModuleLoadData", "context=%lx mode=%d %.4s", (unsigned long)current, capture_mode, image);
  if (getenv("FAKE_CUDA_SLOW")) usleep(200000);
  *module = NULL;
  if (status) return status;
  *module = calloc(1, sizeof **module);
  pthread_mutex_lock(&lock);
  (*module)->next = modules, (*module)->loaded = 1, modules = *module;
  pthread_mutex_unlock(&lock);
  return 0;
}
int cuModuleUnload(Module* module) {
  if (!module->loaded) fail("not loaded:", "a module");
  module->loaded = 0;
  return record("cuModuleUnload", "");
}
int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  if (!module->loaded) fail("not loaded:", name);
  if (!sizes_of(name)) return record("cuModuleGetFunction", "%s", name), 500;
  *function = calloc(1, sizeof **function);
  snprintf((*function)->name, sizeof (*function)->name, "%s", name);
  pthread_mutex_lock(&lock);
  (*function)->next = functions, functions = *function;
  pthread_mutex_unlock(&lock);
  return record("cuModuleGetFunction", "%s", name);
}
#ifndef BEFORE_CUDA_12_4
int cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size) {
  const char* sizes = sizes_of(function->name);
  for (size_t i = 0; i <= index; ++i)
    if (sizes[i] != '4' && sizes[i] != '8') return 1;
  *offset = 8 * index, *size = (size_t)(sizes[index] - '0');
  return 0;
}
#endif
int cuFuncSetAttribute(Function* function, int attribute, int value) {
  return record("cuFuncSetAttribute", "%s %d=%d", function->name, attribute, value);
}
int cuFuncSetCacheConfig(Function* function, int preference) {
  return record("cuFuncSetCacheConfig", "%s %d", function->name, preference);
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads, size_t bytes) {
  *blocks = fact(4);
  return record("cuOccupancyMaxActiveBlocksPerMultiprocessor", "%s %d %zu", function->name, threads, bytes);
}
int cuLaunchKernelEx(const Config* config, Function* function, void** parameters, void** extra) {
  char attributes[256] = "", values[4096] = "";
  int at = 0;
  for (unsigned i = 0; i < config->count; ++i)
    at += snprintf(attributes + at, sizeof attributes - (size_t)at, "%s%d:%u", i ? "," : "", config->attributes[i].id,
                   config->attributes[i].value.dimensions[0]);
  if (extra) fail("extra parameters of", function->name);
  at = 0;
  int i = 0;
  for (const char* sizes = sizes_of(function->name); *sizes == '4' || *sizes == '8'; ++sizes, ++i) {
    size_t size = (size_t)(*sizes - '0');
    if ((uintptr_t)parameters[i] % size) fail("a parameter is not aligned:", function->name);
    uint64_t value = 0;
    memcpy(&value, parameters[i], size);
    at += snprintf(values + at, sizeof values - (size_t)at, "%s%llx", i ? "," : "", (unsigned long long)value);
  }
  const unsigned *grid = config->grid, *block = config->block;
  int status = record("cuLaunchKernelEx", "%s grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%lx attributes=%s "
                      "context=%lx parameters=%s", function->name, grid[0], grid[1], grid[2], block[0], block[1],
                      block[2], config->shared, (unsigned long)(uintptr_t)config->stream, attributes,
                      (unsigned long)current, values);
  if (!status && !strcmp(function->name, "add"))
    for (int k = 0; k < *(int*)parameters[2]; ++k)
      (*(float**)parameters[1])[k] = (*(float**)parameters[0])[k] + *(float*)parameters[3];
  return status;
}
