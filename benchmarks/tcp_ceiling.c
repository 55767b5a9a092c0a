// Measures the speed of TCP on this machine: bare blocking send and recv over the buffers that a
// transfer would use. One thread per stream and side.
//
//   tcp_ceiling serve ADDRESS PORT                  (until it is killed)
//   tcp_ceiling run ADDRESS PORT STREAMS READ|WRITE BUFFER BLOCK TOTAL
//
// The buffer has BUFFER bytes on both sides, divided among the streams. Its blocks are moved in
// turn until TOTAL bytes are done. WRITE: `run` sends; READ: `serve` sends. The receiver
// acknowledges the end with one byte. Prints bytes per second.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct Order {
  uint64_t reads, buffer, block, total;  // for one stream
};

static void fail(const char* what) {
  perror(what);
  exit(1);
}

static char* memory(uint64_t bytes) {
  char* at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) fail("mmap");
  memset(at, 1, bytes);
  return at;
}

static void sendAll(int socket, const char* data, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = send(socket, data, bytes, MSG_NOSIGNAL);
    if (sent <= 0) fail("send");
    data += sent, bytes -= sent;
  }
}

static void receiveAll(int socket, char* data, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t got = recv(socket, data, bytes, 0);
    if (got <= 0) fail("recv");
    data += got, bytes -= got;
  }
}

static void move(int socket, const struct Order* order, char* buffer, int sends) {
  for (uint64_t done = 0; done < order->total; done += order->block) {
    char* at = buffer + done % order->buffer;
    if (sends)
      sendAll(socket, at, order->block);
    else
      receiveAll(socket, at, order->block);
  }
  char byte = 0;  // acknowledges that all has arrived
  if (sends)
    receiveAll(socket, &byte, 1);
  else
    sendAll(socket, &byte, 1);
}

static struct sockaddr_in addressOf(const char* host, const char* port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
  if (inet_pton(AF_INET, host, &address.sin_addr) != 1) fail("inet_pton");
  return address;
}

static void* serveOne(void* argument) {
  const int socket = (int)(intptr_t)argument;
  struct Order order;
  receiveAll(socket, (char*)&order, sizeof(order));
  char* buffer = memory(order.buffer);
  char ready = 1;
  sendAll(socket, &ready, 1);
  receiveAll(socket, &ready, 1);
  move(socket, &order, buffer, order.reads);
  munmap(buffer, order.buffer);
  close(socket);
  return NULL;
}

struct Stream {
  pthread_t thread;
  int socket;
  struct Order order;
  char* buffer;
};

static void* runOne(void* argument) {
  struct Stream* stream = argument;
  char go = 1;
  sendAll(stream->socket, &go, 1);
  move(stream->socket, &stream->order, stream->buffer, !stream->order.reads);
  return NULL;
}

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec + at.tv_nsec * 1e-9;
}

int main(int count, char** arguments) {
  if (count == 4 && !strcmp(arguments[1], "serve")) {
    const struct sockaddr_in address = addressOf(arguments[2], arguments[3]);
    const int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(listener, (const struct sockaddr*)&address, sizeof(address)) != 0) fail("bind");
    if (listen(listener, 64) != 0) fail("listen");
    for (;;) {
      const int socket = accept(listener, NULL, NULL);
      if (socket < 0) fail("accept");
      pthread_t thread;
      if (pthread_create(&thread, NULL, serveOne, (void*)(intptr_t)socket)) fail("pthread_create");
      pthread_detach(thread);
    }
  }
  if (count != 9 || strcmp(arguments[1], "run")) {
    fprintf(stderr, "see the top of tcp_ceiling.c\n");
    return 2;
  }
  const struct sockaddr_in address = addressOf(arguments[2], arguments[3]);
  const int streams = atoi(arguments[4]);
  struct Order order = {.reads = !strcmp(arguments[5], "READ"),
                        .buffer = strtoull(arguments[6], NULL, 10) / streams,
                        .block = strtoull(arguments[7], NULL, 10),
                        .total = strtoull(arguments[8], NULL, 10) / streams};
  struct Stream all[64];
  for (int i = 0; i < streams; ++i) {
    all[i] = (struct Stream){.socket = socket(AF_INET, SOCK_STREAM, 0), .order = order};
    const int on = 1;
    setsockopt(all[i].socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    if (connect(all[i].socket, (const struct sockaddr*)&address, sizeof(address)) != 0)
      fail("connect");
    all[i].buffer = memory(order.buffer);
    sendAll(all[i].socket, (char*)&order, sizeof(order));
    char ready;
    receiveAll(all[i].socket, &ready, 1);
  }
  const double began = now();
  for (int i = 0; i < streams; ++i)
    if (pthread_create(&all[i].thread, NULL, runOne, &all[i])) fail("pthread_create");
  for (int i = 0; i < streams; ++i) pthread_join(all[i].thread, NULL);
  printf("%.0f\n", order.total * streams / (now() - began));
  return 0;
}
