// An API server of Kubernetes with its etcd in one process, for tests: nothing schedules or runs what it admits.
package main

import (
	"fmt"
	"net/url"
	"os"

	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	if err := startEtcd(os.Getenv("ETCD_DIR"), os.Getenv("ETCD_CLIENT_URL"), os.Getenv("ETCD_PEER_URL")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cli.Run(app.NewAPIServerCommand()))
}

func startEtcd(folder, client, peer string) error {
	clientURL, err := url.Parse(client)
	if err != nil {
		return err
	}
	peerURL, err := url.Parse(peer)
	if err != nil {
		return err
	}
	config := embed.NewConfig()
	config.Dir = folder
	config.LogLevel = "error"
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{*clientURL}, []url.URL{*clientURL}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{*peerURL}, []url.URL{*peerURL}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		return err
	}
	<-etcd.Server.ReadyNotify()
	return nil
}
