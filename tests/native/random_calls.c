// Calls the handler of `launch.c` with random attributes, and with a driver whose functions fail at random:
//
//   random_calls SEED CALLS
//
// Half of the calls are right, but for large grids and what the driver does. The others have up to three faults. Every
// attribute has an allocation of its own size, so that a sanitizer sees what is read beyond it. Prints lines of a stage,
// the code of an error or 0, and the number of calls.
#include "launch.c"

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
};

enum { MAX_ATTRIBUTES = 1 + 5 * (MAX_KERNELS + 1), ARGUMENTS = 3, RESULTS = 2 };

static uint64_t state;
static int ordinal;

static uint64_t below(uint64_t n) {  // xorshift64*
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return (state * 0x2545f4914f6cdd1d >> 16) % n;
}

static bool chance(int percent) { return below(100) < (uint64_t)percent; }

static XLA_FFI_Error* create(XLA_FFI_Error_Create_Args* args) {
  XLA_FFI_Error* error = malloc(sizeof *error);
  error->code = args->errc;
  if (!strlen(args->message)) abort();
  return error;
}

static XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  if (chance(1)) return create(&(XLA_FFI_Error_Create_Args){.message = "no stream", .errc = XLA_FFI_Error_Code_UNKNOWN});
  args->stream = (void*)0x5eed;
  return NULL;
}

static XLA_FFI_Error* get_ordinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = ordinal;
  return NULL;
}

static int64_t any_integer(void) {
  static const int64_t EDGES[] = {0, 1, -1, 2, 16, 64, 1024, 1025, 65535, 65536, INT32_MAX, INT32_MIN, 1LL << 31,
                                  UINT32_MAX, 1LL << 32, 1LL << 40, INT64_MAX, INT64_MIN};
  return chance(80) ? EDGES[below(sizeof EDGES / sizeof *EDGES)] : (int64_t)(below(UINT64_MAX) << 16 ^ below(UINT64_MAX));
}

static void* copy(const void* data, size_t size) {
  void* result = malloc(size);
  if (size) memcpy(result, data, size);
  return result;
}

static XLA_FFI_ByteSpan* span_of(const void* data, size_t size) {
  XLA_FFI_ByteSpan span = {.ptr = copy(data, size), .len = size};
  return copy(&span, sizeof span);
}

static XLA_FFI_Array* array_of(const int64_t* data, size_t size) {
  XLA_FFI_Array array = {XLA_FFI_DataType_S64, size, copy(data, 8 * size)};
  return copy(&array, sizeof array);
}

// A call of the handler.
static struct {
  XLA_FFI_Attrs attrs;
  XLA_FFI_ByteSpan* names[MAX_ATTRIBUTES];
  XLA_FFI_AttrType types[MAX_ATTRIBUTES];
  void* values[MAX_ATTRIBUTES];
} made;

static void add(const char* name, int k, XLA_FFI_AttrType type, void* value) {
  char text[64];
  int size = k < 0 ? snprintf(text, sizeof text, "%s", name) : snprintf(text, sizeof text, "%s_%d", name, k);
  int64_t i = made.attrs.size++;
  made.names[i] = span_of(text, (size_t)size), made.types[i] = type, made.values[i] = value;
}

static void release(int64_t i) {
  free((void*)made.names[i]->ptr);
  free(made.names[i]);
  if (made.types[i] == XLA_FFI_AttrType_STRING) free((void*)((XLA_FFI_ByteSpan*)made.values[i])->ptr);
  if (made.types[i] == XLA_FFI_AttrType_ARRAY) free(((XLA_FFI_Array*)made.values[i])->data);
  if (made.types[i] == XLA_FFI_AttrType_SCALAR) free(((XLA_FFI_Scalar*)made.values[i])->value);
  free(made.values[i]);
}

// The kernels of the fake driver, with their parameters as pairs of a kind and a value.
static const struct {
  const char* name;
  size_t count;
  int64_t parameters[10];
} KERNELS[] = {
    {"first", 5, {BUFFER, 0, BUFFER, 3, INT32, -7, FLOAT32, 0xbf800000, NULL_POINTER, 0}},
    {"second", 1, {INT64, INT64_MIN}},
    {"third", 2, {BUFFER, 4, BUFFER, 1}},
};

static void add_kernel(int k) {
  uint64_t which = below(sizeof KERNELS / sizeof *KERNELS);
  int64_t launch[LAUNCH_FIELDS] = {
      1 + (int64_t)below(8), 1, 1, 32, (int64_t)below(2) * 100000, which == 1 ? 16 : 1, which == 2, (int64_t)below(2),
      chance(50) ? 80 : 90};
  for (int i = GRID_X; i <= GRID_Z; ++i)
    if (chance(5)) launch[i] = chance(50) ? INT32_MAX : 65535;
  char cubin[128], key[KEY_LENGTH + 1];
  size_t size = 1 + below(sizeof cubin);
  memset(cubin, 'A' + (int)below(26), size);
  Call call = {.cubin = {.ptr = cubin, .len = size}, .launch = launch};
  strcpy(call.name, KERNELS[which].name);
  key_of(&call, key);
  add("cubin", k, XLA_FFI_AttrType_STRING, span_of(cubin, size));
  add("name", k, XLA_FFI_AttrType_STRING, span_of(call.name, strlen(call.name)));
  add("key", k, XLA_FFI_AttrType_STRING, span_of(key, KEY_LENGTH));
  add("launch", k, XLA_FFI_AttrType_ARRAY, array_of(launch, LAUNCH_FIELDS));
  add("parameters", k, XLA_FFI_AttrType_ARRAY, array_of(KERNELS[which].parameters, 2 * KERNELS[which].count));
}

static void add_count(int64_t count) {
  XLA_FFI_Scalar scalar = {XLA_FFI_DataType_S64, copy(&count, 8)};
  add("kernels", -1, XLA_FFI_AttrType_SCALAR, copy(&scalar, sizeof scalar));
}

// Changes an attribute: its name, its type, its size, or a part of it.
static void spoil(int64_t i) {
  void* value = made.values[i];
  if (chance(10)) {
    ((char*)made.names[i]->ptr)[below(made.names[i]->len)] = (char)below(256);
  } else if (chance(10)) {
    release(i), --made.attrs.size;
    int64_t last = made.attrs.size;
    made.names[i] = made.names[last], made.types[i] = made.types[last], made.values[i] = made.values[last];
    if (chance(30)) add_count(any_integer());
  } else if (made.types[i] == XLA_FFI_AttrType_STRING) {
    XLA_FFI_ByteSpan* span = value;
    char text[MAX_NAME + 2];
    size_t size = chance(50) ? span->len : below(sizeof text);
    memset(text, 'a', sizeof text);
    memcpy(text, span->ptr, size < span->len ? size : span->len);
    if (size && chance(70)) text[below(size)] = (char)below(chance(50) ? 256 : 1);
    free((void*)span->ptr);
    span->ptr = copy(text, size), span->len = size;
  } else if (made.types[i] == XLA_FFI_AttrType_ARRAY) {
    XLA_FFI_Array* array = value;
    int64_t numbers[2 * MAX_PARAMETERS + 2] = {0};
    size_t size = chance(60) ? array->size : below(sizeof numbers / 8 + 1);
    if (array->data) memcpy(numbers, array->data, 8 * (size < array->size ? size : array->size));
    if (size) numbers[below(size)] = chance(50) ? (int64_t)below(6) : any_integer();
    free(array->data);
    array->data = size || chance(50) ? copy(numbers, 8 * size) : NULL, array->size = size;
    if (chance(10)) array->dtype = XLA_FFI_DataType_S32;
  } else {
    XLA_FFI_Scalar* scalar = value;
    *(int64_t*)scalar->value = any_integer();
    if (chance(20)) scalar->dtype = XLA_FFI_DataType_F64;
  }
}

static void choose_failure(void) {
  static const char* const NAMES[] = {
#define NAME(function, arguments) #function,
      DRIVER(NAME)
#undef NAME
      "cuCtxPushCurrent", "cuCtxPopCurrent"};
  static const int STATUS[] = {1, 2, 200, 209, 719};
  char text[96];
  snprintf(text, sizeof text, "%s=%d", NAMES[below(sizeof NAMES / sizeof *NAMES)], STATUS[below(5)]);
  if (chance(15)) setenv("FAKE_CUDA_FAIL", text, 1);
  else unsetenv("FAKE_CUDA_FAIL");
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  state = strtoull(argv[1], NULL, 10) * 2 + 1;
  setenv("FAKE_CUDA_PARAMETERS", "first:88448;second:8;third:88", 1);
  XLA_FFI_Api api = {
      .XLA_FFI_Error_Create = create, .XLA_FFI_Stream_Get = get_stream, .XLA_FFI_DeviceOrdinal_Get = get_ordinal};
  long counts[4][32] = {{0}};
  for (long n = strtol(argv[2], NULL, 10); n > 0; --n) {
    made.attrs.size = 0;
    made.attrs.names = made.names, made.attrs.types = made.types, made.attrs.attrs = made.values;
    int kernels = 1 + (int)below(chance(90) ? 3 : MAX_KERNELS);
    for (int k = 0; k < kernels; ++k) add_kernel(k);
    add_count(kernels);
    for (uint64_t faults = chance(50) ? 0 : 1 + below(3); faults && made.attrs.size; --faults)
      spoil((int64_t)below((uint64_t)made.attrs.size));
    XLA_FFI_Buffer buffers[ARGUMENTS + RESULTS];
    void* pointers[ARGUMENTS + RESULTS];
    for (int i = 0; i < ARGUMENTS + RESULTS; ++i)
      buffers[i].data = (void*)(uintptr_t)(16 * (1 + below(1000)) + chance(2)), pointers[i] = &buffers[i];
    static const XLA_FFI_ExecutionStage STAGES[] = {
        XLA_FFI_ExecutionStage_INSTANTIATE, XLA_FFI_ExecutionStage_PREPARE, XLA_FFI_ExecutionStage_INITIALIZE,
        XLA_FFI_ExecutionStage_EXECUTE, XLA_FFI_ExecutionStage_EXECUTE, XLA_FFI_ExecutionStage_EXECUTE};
    XLA_FFI_CallFrame frame = {
        .api = &api, .stage = STAGES[below(6)], .attrs = made.attrs, .args = {.size = ARGUMENTS, .args = pointers},
        .rets = {.size = RESULTS, .rets = pointers + ARGUMENTS}};
    ordinal = (int)below(2);
    choose_failure();
    XLA_FFI_Error* failure = jaxrnn_launch_v1(&frame);
    ++counts[frame.stage][failure ? failure->code : 0];
    free(failure);
    for (int64_t i = 0; i < made.attrs.size; ++i) release(i);
  }
  for (int stage = 0; stage < 4; ++stage)
    for (int code = 0; code < 32; ++code)
      if (counts[stage][code]) printf("%d %d %ld\n", stage, code, counts[stage][code]);
  return 0;
}
